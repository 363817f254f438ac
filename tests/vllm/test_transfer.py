"""Weights by NCCL, as far as a machine without GPUs goes: what is sent passes vLLM's own checks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from tasks.engines.servers import nccl_transfer


@pytest.fixture
def folder(make):
    return Path(make(tied=False)[1].path)


def test_weights_are_those_of_the_folder_as_they_were_announced(folder):
    source = nccl_transfer.Weights(folder, "cpu")
    sent = dict(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata()))
    written = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], written[name]) for name in written)


def test_messages_of_an_update(folder, monkeypatch):
    asked = []

    def ask(path, body):
        asked.append((path, body))

    class Opened(NCCLTrainerWeightTransferEngine):
        """vLLM's sender, without GPUs: it opens no group, and broadcasts nothing."""

        _broadcast = _post_send_sync = lambda *_: None

        @classmethod
        def trainer_init(cls, init_info, *, client, source):
            monkeypatch.setattr(
                "vllm.distributed.weight_transfer.nccl_engine.open_trainer_endpoint", lambda _: None
            )
            return super().trainer_init(init_info, client=client, source=source)

    monkeypatch.setattr(nccl_transfer, "NCCLTrainerWeightTransferEngine", Opened)
    monkeypatch.setenv(nccl_transfer.HOST, "127.0.0.1")
    nccl_transfer.send(ask, 2, folder)
    opening, start, weights, finish, shutdown = asked
    init = NCCLWeightTransferInitInfo(**opening[1]["init_info"])
    assert (init.master_address, init.world_size, init.rank_offset) == ("127.0.0.1", 3, 1)
    update = NCCLWeightTransferUpdateInfo(**weights[1]["update_info"])
    assert update.names == [each.name for each in nccl_transfer.Weights(folder, "cpu").metadata()]
    paths = [path for path, _ in (opening, start, weights, finish, shutdown)]
    assert paths == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
    ]
