# %% [markdown]
# # Noise of an analog accelerator
#
# How much noise does a network with ternary weights and 4-bit activations tolerate, and does training with noise help? The
# networks were trained by `examples/fq_conv/train.py`. This notebook needs `pip install 'hespas[jax]'`.

# %%
import hespas

hespas.sample(["noise"])
data = "samples/noise/digits-test.npz"
mac, weight, activation = [0, 0.5, 1, 2, 3], [0, 0.1, 0.2, 0.4], [0, 0.4, 0.8, 1.6]

# %% [markdown]
# Run the network that was trained without noise. Sigma is in LSB: steps of the quantisers.

# %%
plain = hespas.noise(
    "samples/noise/digits-plain.mlir.gz",
    data=data,
    sigma_mac=mac,
    sigma_weight=weight,
    sigma_activation=activation,
    seeds=4,
)
plain

# %%
plain.plot("accuracy")

# %% [markdown]
# The contractions that matter most are first: each row has noise at one contraction alone.

# %%
plain.sites_table()

# %% [markdown]
# The network that was trained with noise on weights, activations and results has a higher accuracy at large sigmas.

# %%
aware = hespas.noise(
    "samples/noise/digits-noise-aware.mlir.gz",
    data=data,
    sigma_mac=mac,
    sigma_weight=weight,
    sigma_activation=activation,
    seeds=4,
)
for kind in plain.kinds:
    for before, after in zip(plain.curve(kind), aware.curve(kind), strict=True):
        print(
            f"{kind:10} {before.sigma:4g} LSB: {before.accuracy:.1%} plain, {after.accuracy:.1%} noise-aware"
        )
