# %% [markdown]
# # From a program to a cluster
#
# A Llama-style training step is a StableHLO program for 8 devices. What does it cost on clusters that nobody has
# built, and what would a larger model need?

# %%
import pandas as pd

import hespas

hespas.sample(["programs"])
program = "samples/llama_fsdp_tp_local_N8.mlir.gz"
hespas.view(program)

# %% [markdown]
# One call per system: the name of a system includes its device and its network.

# %%
systems = ["dgx-a100", "dgx-h100", "dgx-b200"]
steps = {name: hespas.simulate(program, system=name) for name in systems}
pd.DataFrame(
    {
        "step_us": {name: step.step_ns / 1e3 for name, step in steps.items()},
        "low_us": {name: step.interval_ns[0] / 1e3 for name, step in steps.items()},
        "high_us": {name: step.interval_ns[1] / 1e3 for name, step in steps.items()},
    }
).round(1)

# %% [markdown]
# The timeline shows why: on small layers, communication and launches dominate.

# %%
steps["dgx-h100"].plot("timeline")

# %% [markdown]
# A model needs no program. `llm_step` makes the step of a model at any parallelism; `generate` simulates it, with its
# memory. Here the layout of Llama-3-70B on 256 devices varies.

# %%
rows = {}
for tp, pp in ((8, 4), (8, 8), (4, 8)):
    layout = hespas.llm_step("llama-3-70b", dp=256 // (tp * pp), tp=tp, pp=pp, zero=1, global_batch=256)
    made = hespas.generate(layout, system="dgx-h100")
    assert made.step is not None
    rows[f"dp {256 // (tp * pp)}, tp {tp}, pp {pp}"] = {
        "step_s": made.step.step_ns / 1e9,
        "mfu": made.step.throughput.mfu,
        "memory_gb": made.account.peak_memory_bytes / 1e9,
        "fits": made.fits,
    }
pd.DataFrame(rows).T

# %% [markdown]
# The table of models, devices and systems that ship:

# %%
hespas.list_systems()
