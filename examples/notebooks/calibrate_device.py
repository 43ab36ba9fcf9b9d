# %% [markdown]
# # Calibrate a device
#
# Data sheets are optimistic. With a recording of a small program, the prediction of a larger one gets better. The
# samples hold two recordings of training steps on a 2-core CPU, and the hardware file of that CPU.

# %%
import hespas

hespas.sample(["xplane"])
small = "samples/recorded/train-small.xplane.pb.gz"
larger = "samples/recorded/train-larger.xplane.pb.gz"
cpu = "samples/recorded/recorded-cpu.toml"

# %% [markdown]
# Before: the larger step predicted from the data sheet, operation by operation and end to end.

# %%
before = hespas.accuracy(profiles=larger, hardware=cpu)
before

# %% [markdown]
# `calibrate` fits the kernels of the small recording, and tests the fits on sizes that it leaves out.

# %%
fits = hespas.calibrate(profiles=small, hardware=cpu)
fits.write("my-cpu.toml")
fits

# %% [markdown]
# After: the same prediction with the calibrated device. The step is close to its measurement. Single operations are not:
# their errors have both signs and cancel in the sum.

# %%
after = hespas.accuracy(profiles=larger, hardware="my-cpu.toml")
for name, report in (("before", before), ("after", after)):
    run = report.to_dict()["end_to_end"][0]
    print(f"{name}: {run['predicted_ns'] / 1e6:.1f} ms predicted, {run['measured_ns'] / 1e6:.1f} ms measured")

# %% [markdown]
# A device of your own, by name in every call: put the file into the folder `devices` of the configuration folder
# (`~/.config/hespas`), or make it the default with `HESPAS_HARDWARE`.

# %%
hespas.list_devices()
