"""PPO against a loop by hand, in which every rank plays its own episodes."""

from __future__ import annotations

from typing import Any

import torch
from loops.harness import SEED, Draw, Loop, rows
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import mse_loss
from torch.optim import Adam

GAMMA, LAMBDA, STEPS = 0.99, 0.95, 200


def play(task: Any, example: Any, start: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return states, actions, log-probabilities, advantages and returns of (episodes × steps)."""
    state, states, actions, chances, alive, values = start, [], [], [], [], []
    with torch.no_grad():
        for _ in range(STEPS + 1):  # the last is for its value only
            policy = Categorical(logits=task.policy(state))
            action = torch.multinomial(policy.probs, 1, True, generator=generator)[:, 0]
            following, stands = example.cart_pole(state, action)
            states.append(state)
            actions.append(action)
            chances.append(policy.log_prob(action))
            alive.append(stands)
            values.append(task.value(state)[:, 0])
            state = torch.where(stands[:, None], following, start)
    gains: list[Tensor] = []
    gain = torch.zeros(len(start))
    for t in reversed(range(STEPS)):
        gain = alive[t] * (1 + GAMMA * (values[t + 1] + LAMBDA * gain)) - values[t]
        gains.insert(0, gain)
    returns = [gain + value for gain, value in zip(gains, values[:-1], strict=True)]
    columns = (states[:-1], actions[:-1], chances[:-1], gains, returns)
    return [torch.stack(each, 1).flatten(0, 1) for each in columns]


class TestPPO(Loop):
    example = "ppo"
    batches = 3
    microbatch = 300

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        task = example.PPO()
        adam = Adam(task.parameters(), lr=3e-3)
        for starts in batches:
            played = [
                play(task, example, rows(starts, rank, draw.ranks), generator)
                for rank, generator in enumerate(draw.generators)
            ]
            for _ in range(4):
                orders = [torch.randperm(len(played[0][0]), generator=each).chunk(4) for each in draw.generators]
                for part in range(4):
                    samples = [[each[order[part]] for each in seen] for seen, order in zip(played, orders, strict=True)]
                    states, actions, before, gains, returns = map(torch.cat, zip(*samples, strict=True))
                    policy = Categorical(logits=task.policy(states))
                    ratio = (policy.log_prob(actions) - before).exp()
                    gain = torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
                    error = mse_loss(task.value(states)[:, 0], returns)
                    adam.zero_grad()
                    (0.5 * error - gain - 0.01 * policy.entropy().mean()).backward()
                    adam.step()
        return dict(task.state_dict())

    def test_advantages_are_those_of_equation_11(self, loop: Any) -> None:
        torch.manual_seed(SEED)
        task = loop.PPO()
        states, _, _, stood, gains, returns = task.play(next(iter(loop.data(episodes=3))))
        values = task.value(states)[:, 0].detach().view(3, STEPS)
        stood, gains = stood.view(3, STEPS), gains.view(3, STEPS)
        assert not stood.all()
        for episode in range(3):
            for t in (0, 50, 120):
                end = t + int(stood[episode, t:].int().argmin())  # the step in which the pole falls
                assert not stood[episode, end]
                surprises = [1 + GAMMA * values[episode, i + 1] - values[episode, i] for i in range(t, end)]
                surprises.append(-values[episode, end])
                expected = sum((GAMMA * LAMBDA) ** i * each for i, each in enumerate(surprises))
                torch.testing.assert_close(gains[episode, t], expected)
        torch.testing.assert_close(returns, gains.flatten() + values.flatten())
