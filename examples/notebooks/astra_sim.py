# %% [markdown]
# # Run on ASTRA-sim
#
# Any workload becomes Chakra execution traces, which ASTRA-sim reads. The simulation below needs no ASTRA-sim: mode
# `astra` gives its nanoseconds.

# %%
from pathlib import Path

import hespas

hespas.sample(["programs", "astra-sim"])
done = hespas.convert("samples/llama_fsdp_tp_local_N8.mlir.gz", "traces", hardware="H100-SXM")
done

# %% [markdown]
# The account of the conversion shows what was merged or dropped, and that sums are kept.

# %%
done.to_pandas()

# %% [markdown]
# Check the traces before a simulator reads them.

# %%
checked = hespas.check("traces", profile="astra-sim")
checked

# %% [markdown]
# A system of the catalogue, or your own, becomes the configuration files of ASTRA-sim.

# %%
system = hespas.load_system("dgx-h100", 8)
sorted(path.name for path in system.write_astra_sim("configuration"))

# %%
step = hespas.simulate(
    "traces",
    mode="astra",
    system_config="configuration/system.json",
    network_config="configuration/network.yml",
    memory_config="configuration/remote_memory.json",
)
print(f"{step.step_ns:,.0f} ns, as ASTRA-sim's analytical simulator computes them")

# %% [markdown]
# To run ASTRA-sim itself on the same files, pass its binary: `simulator="astra-sim", astra_bin="PATH"`. The result then
# holds both times. Sweeps over configurations are TOML files:

# %%
print(Path("samples/astra_sim/what_if.toml").read_text())
