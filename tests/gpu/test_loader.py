"""Entries on their way from host memory to the device: every byte arrives, over CUDA's link too."""

from __future__ import annotations

import tempfile
from typing import cast

import numpy as np
import pytest
import torch

from maskserve_common.config import ENTRY_FORMATS
from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, encode
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import CudaMover, HostMover, LinkRates, Mover
from maskserve_engine.cache.registered import HostRegister, Registrar
from maskserve_engine.cache.reserve import Reserve
from maskserve_engine.fitting.entry_store import memory_file
from tests.fakes.entries import NOTE, random_entry


@pytest.mark.parametrize("format", ENTRY_FORMATS)
@pytest.mark.parametrize("tokens", [None, 700])
def test_what_arrives_is_what_was_sent(
    device: torch.device, format: str, tokens: int | None
) -> None:
    """Through buffers that hold a part of it, so that the ring goes round."""
    mover: Mover = CudaMover(device, 2**16) if device.type == "cuda" else HostMover()
    coded_tensors = [encode(torch.randn(1000, 96).bfloat16(), format) for _ in range(4)]
    rng = np.random.default_rng(0)
    ids = None if tokens is None else np.sort(rng.permutation(1000)[:tokens])
    arrived = [mover.move((coded,), ids) for coded in coded_tensors]
    for coded, arrival in zip(coded_tensors, arrived, strict=True):
        (device_coded,) = arrival.get()
        expected = coded if ids is None else coded.take(torch.from_numpy(ids))
        for tensor, expected_tensor in zip(device_coded.tensors(), expected.tensors(), strict=True):
            assert tensor.device.type == device.type
            assert torch.equal(tensor.cpu(), expected_tensor)
    assert all(arrival.ready() for arrival in arrived)


def test_memory_that_streams_hand_to_one_another_holds_what_was_written(
    device: torch.device,
) -> None:
    """Loads and entries of random sizes, each read behind many that had its place."""
    mover: Mover = HostMover()
    loads = None
    if device.type == "cuda":
        mover = CudaMover(device, 2**16)
        loads = mover.stream
    reserve, rng = Reserve(2**20, device, loads), np.random.default_rng(0)
    for turn in range(200):
        coded = encode(torch.randn(int(rng.integers(100, 900)), 256), "int8")
        entry = AnchorEntry(Anchor(0.5, 500.0), (BlockEntry(coded),))
        block = reserve.take(entry.room, stays=turn % 2 == 0)
        assert block is not None
        if turn % 2:
            (device_coded,) = mover.move((coded,), None, block).get()
        else:
            near = AnchorEntry(
                entry.anchor, (BlockEntry(coded.map(*[lambda t: t.to(device)] * 2)),)
            )
            (device_coded,) = near.within(block).blocks[0].part("h")
        read = device_coded.data.float() * device_coded.scale
        del block, device_coded  # its place is another's while the device still reads
        expected = torch.empty(coded.data.shape)
        coded.into(expected)
        torch.testing.assert_close(read.cpu(), expected)


@pytest.mark.parametrize("format", ENTRY_FORMATS)
@pytest.mark.parametrize("tokens", [None, 700])
def test_the_device_reads_files_in_memory_by_itself(
    device: torch.device, format: str, tokens: int | None
) -> None:
    """Whole tensors out of a registered file, of which it takes its tokens."""
    if device.type != "cuda":
        pytest.skip("the host needs no such way")
    registrar = Registrar(device)
    mover = CudaMover(device, 2**16, registrar=registrar, rates=LinkRates(gathered=1.0))
    entry = random_entry(0, tokens=1000, width=96, format=format)
    rng = np.random.default_rng(0)
    ids = None if tokens is None else np.sort(rng.permutation(1000)[:tokens])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tier = FolderTier("host", folder, 10**9, opened=mover.register)
        assert tier.put("k", entry, NOTE)
        stored = tier.open("k", entry.anchor)
        assert stored is not None
        assert stored.file.registered is not None, "the driver refuses: see the log"
        tier.evict("k")  # what is open stays
        for block, block_entry in zip(stored.blocks, entry.blocks, strict=True):
            arrived = mover.move(block.part("kv"), ids).get()
            expected = block_entry.part("kv")
            if ids is not None:
                expected = tuple(coded.take(torch.from_numpy(ids)) for coded in expected)
            for device_coded, expected_coded in zip(arrived, expected, strict=True):
                for tensor, expected_tensor in zip(
                    device_coded.tensors(), expected_coded.tensors(), strict=True
                ):
                    assert torch.equal(tensor.cpu(), expected_tensor)
        del stored, block
    mover.close()
    assert registrar.nbytes == 0


def test_a_refused_registration_fails_no_later_kernel(device: torch.device) -> None:
    """CUDA repeats such an error behind the thread's next kernel."""
    if device.type != "cuda":
        pytest.skip("the host needs no such way")

    class Twice:
        """Registers everything a second time, which is refused."""

        def cudaHostRegister(self, *args: int) -> int:  # noqa: N802
            runtime = torch.cuda.cudart()
            assert not int(runtime.cudaHostRegister(*args))
            failed = int(runtime.cudaHostRegister(*args))
            assert not int(runtime.cudaHostUnregister(args[0]))
            return failed

    registrar = Registrar(device, cast(HostRegister, Twice()))
    with memory_file(2**16) as file:
        assert registrar.register(file.descriptor, file.nbytes) is None
    assert torch.ones(8, device=device).add_(1).sum().item() == 16
    registrar.close()
