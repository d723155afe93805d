"""Eight CPU devices and no network, set before anything imports jax."""

import os

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "HF_HUB_OFFLINE": "1"}
