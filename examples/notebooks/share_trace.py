# %% [markdown]
# # Share a trace
#
# A trace of a run is wanted by people with other tools. What does each format keep, and what does a file still tell
# about its origin?

# %%
import hespas
from hespas.graph import Workload

hespas.sample(["pytorch", "chakra"])
trace = "samples/ffn_train_rank0of2.pt.trace.json.gz"

# %% [markdown]
# Convert the recording to Chakra. The account lists what changes, and each loss has a code.

# %%
done = hespas.convert(trace, "shared", target_format="chakra")
for diagnostic in done.diagnostics:
    print(f"{diagnostic.severity.value}: {diagnostic.message} [{diagnostic.code}]")

# %% [markdown]
# Read it back as the receiver does. The simulated step of the trace is the recorded one.

# %%
hespas.view("shared")

# %%
recorded, received = hespas.simulate(trace), hespas.simulate("shared")
print(
    f"{recorded.step_ns / 1e3:,.1f} us from the recording, {received.step_ns / 1e3:,.1f} us from the shared trace"
)

# %% [markdown]
# `roundtrip` converts files through all formats and back, and reports every loss.

# %%
hespas.roundtrip(["samples/pipeline_2x2"])

# %% [markdown]
# Names that a trace shows to others: look through them before you publish it.

# %%
job = hespas.read("shared")
assert isinstance(job, Workload)
strings = {graph.node_name(node) for graph in job.classes for node in range(len(graph))}
sorted(strings)[:10]
