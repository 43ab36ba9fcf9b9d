# %% [markdown]
# # From a profile to an answer
#
# A recorded training step is slow. Where does its time go, and what would it take on other devices? The profile is
# the trace of one rank, as `torch.profiler` writes it; replace it by your own.

# %%
import hespas

hespas.sample(["pytorch"])
trace = "samples/ffn_train_rank0of2.pt.trace.json.gz"

# %% [markdown]
# `analyze` splits the time of the device into compute, exposed communication (nothing computes meanwhile), copies and
# idle time, and groups it by operation.

# %%
found = hespas.analyze(trace)
found

# %% [markdown]
# The step is bound by the host: the device waits for kernels to be launched. The lengths of the gaps show whether a
# few long waits or many short ones cause it.

# %%
found.plot("idle-histogram")

# %% [markdown]
# Every table is a data frame. These are the operations that take the most time on the device.

# %%
found.to_pandas().nlargest(5, "total_ns")[["operation", "op_class", "count", "total_ns", "share"]]

# %% [markdown]
# The same trace is a workload: `simulate` predicts its step on a device where it never ran. The interval says how far
# the prediction may be off.

# %%
predictions = {name: hespas.simulate(trace, name) for name in ("H100-SXM", "B200-SXM")}
for name, step in predictions.items():
    low, high = step.interval_ns
    print(f"{name}: {step.step_ns / 1e6:.2f} ms ({low / 1e6:.2f} to {high / 1e6:.2f} ms)")

# %% [markdown]
# Diagnostics list what was guessed. Read them before you use a number.

# %%
for diagnostic in list(predictions["B200-SXM"].diagnostics)[:3]:
    print(diagnostic.severity.value, diagnostic.message)
