"""verl's own policy losses on batches in pieces: each is the configured mean over the whole batch."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from rllm.algorithms.from_config import algorithm_of
from rllm.backends.verl.rows import surrogate_of_verl
from rllm.backends.verl.worker_config import check, worker_configs
from rllm.errors import ConfigError
from rllm.trainer.config import TrainConfig, load_config

from .batches import batch_for

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

ALWAYS_THE_SAME_MEAN = {"sapo", "geo_mean"} | ({"gspo"} if version("verl") == "0.9.0" else set())
LOSSES = ["vanilla", "gpg", "cispo", "dppo_tv", "dppo_kl", "kl_cov", "gspo", "sapo", "geo_mean"]
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"]
COMBINATIONS = [
    (loss, aggregation)
    for loss in LOSSES
    for aggregation in AGGREGATIONS
    if loss not in ALWAYS_THE_SAME_MEAN or aggregation == "seq-mean-token-mean"
]


def config_of(model_folder: Path, loss: str, aggregation: str) -> TrainConfig:
    asked = [f"verl.policy_loss={loss}", f"algorithm.aggregation={aggregation}", "rollout.max_tokens=16"]
    return load_config(["backend=verl", f"model.path={model_folder}", "model.device=cpu", *asked])


@pytest.mark.parametrize(("loss", "aggregation"), COMBINATIONS)
def test_unmoved_policy_gives_the_plain_policy_gradient_for_each_loss(
    model_folder: Path, loss: str, aggregation: str
) -> None:
    """Its derivative at a token is minus the advantage times the token's weight, for any division of the sequences."""
    config = config_of(model_folder, loss, aggregation)
    check(config)
    from verl.utils.config import omega_conf_to_dataclass

    config_of_verl = omega_conf_to_dataclass(worker_configs(config)["policy"].part)
    algorithm = algorithm_of(config)
    batch = batch_for(algorithm)
    batch.advantages = torch.linspace(-1.0, 2.0, len(batch))[batch.sequence_of]
    for sequences in ([0, 1, 2, 3, 4, 5, 6], [0, 1], [2, 3, 4, 5, 6]):
        part = batch.select(sequences)
        logprobs = torch.full((part.num_tokens,), -1.5, requires_grad=True)
        loss_of_part, _ = surrogate_of_verl(logprobs, part, algorithm, config_of_verl)
        (slope,) = torch.autograd.grad(loss_of_part, logprobs)
        torch.testing.assert_close(slope, -part.advantages * part.weights)


@pytest.mark.parametrize("loss", sorted(ALWAYS_THE_SAME_MEAN))
def test_loss_with_fixed_aggregation_rejects_others(model_folder: Path, loss: str) -> None:
    named = rf"aggregation='token-mean': verl.policy_loss={loss} .*algorithm.aggregation=seq-mean-token-mean"
    with pytest.raises(ConfigError, match=named):
        check(config_of(model_folder, loss, "token-mean"))
