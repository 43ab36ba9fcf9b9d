"""The league: step times of published runs, predicted from their settings alone, beside what was measured."""
