"""A scalar under an optimizer."""

import jax.numpy as jnp
import optax


def positions(optimizer: optax.GradientTransformation, start: float, gradients: list[float]) -> list[float]:
    """Where a scalar stands after each gradient."""
    theta, found = jnp.float32(start), []
    state = optimizer.init(theta)
    for gradient in gradients:
        updates, state = optimizer.update(jnp.float32(gradient), state, theta)
        theta = optax.apply_updates(theta, updates)
        found.append(float(jnp.asarray(theta)))
    return found
