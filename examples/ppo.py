"""Proximal policy optimization: a policy learns to balance a pole on a cart.

    python examples/ppo.py

After Schulman et al. (2017, arXiv:1707.06347): equation 7 is the policy's loss, 9 the sum with those of value and entropy, 11
the advantage. A batch is the states in which episodes start; `train_batch` plays them, then takes steps on what it saw.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import mse_loss

import hocket

STEPS, EPOCHS, PARTS, DISCOUNT, SMOOTHING, CLIP = 200, 4, 4, 0.99, 0.95, 0.2


def cart_pole(state: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """States after 0.02 s, and whether the poles stand: Barto, Sutton and Anderson (1983), appendix, without friction."""
    _, speed, angle, turning = state.unbind(1)
    push = (20.0 * right - 10.0 + 0.05 * turning**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    state = state + 0.02 * torch.stack([speed, push - 0.05 * turn * angle.cos() / 1.1, turning, turn], 1)
    return state, (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.2095)


class PPO(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    @torch.no_grad()
    def play(self, start: Tensor) -> list[Tensor]:
        """Return what was seen in all steps. A step's reward is 1 if the pole stands; else the pole is set up again."""
        state, seen = start, []
        for _ in range(STEPS + 1):
            policy = Categorical(logits=self.policy(state))
            after, stood = cart_pole(state, action := policy.sample())
            seen.append((state, action, policy.log_prob(action), stood, self.value(state).squeeze(1)))
            state = torch.where(stood[:, None], after, start)
        *seen, stood, values = (torch.stack(each, 1) for each in zip(*seen, strict=True))  # (episodes, steps, …)
        gains = torch.zeros_like(values)
        for t in reversed(range(STEPS)):
            later = values[:, t + 1] + SMOOTHING * gains[:, t + 1]
            gains[:, t] = stood[:, t] * (1 + DISCOUNT * later) - values[:, t]
        return [each[:, :STEPS].flatten(0, 1) for each in (*seen, stood, gains, gains + values)]

    def train_batch(self, start: Tensor, step: Any) -> None:
        samples = self.play(start)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(samples[0])).chunk(PARTS):
                step(self.clipped_loss, [each[rows] for each in samples])

    def clipped_loss(self, samples: list[Tensor]) -> dict[str, Tensor]:
        states, actions, before, stood, gains, returns = samples
        policy = Categorical(logits=self.policy(states))
        ratio = (policy.log_prob(actions) - before).exp()
        gain = torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains).mean()
        loss = 0.5 * mse_loss(self.value(states).squeeze(1), returns) - gain - 0.01 * policy.entropy().mean()
        return {"total": loss, "falls": STEPS * (~stood).float().mean()}


def data(batches: int = 30, episodes: int = 32) -> list[Tensor]:
    return [0.1 * torch.rand(episodes, 4) - 0.05 for _ in range(batches)]


def make_trainer(**changes: Any) -> hocket.Trainer:
    options = {"model": PPO(), "train_data": data(), "optimizer": "adam(lr=3e-3)", "duration": "1ep", "seed": 1}
    return hocket.Trainer(**options | changes)


if __name__ == "__main__":
    falls = make_trainer(loggers=["progress"], log_every="1ba").fit().history["train/falls"]
    print(f"falls in {STEPS} steps: {falls[0]:.1f} in the first batch, {falls[-1]:.1f} in the last")
