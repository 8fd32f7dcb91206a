"""Makes one call and says whether it did what is documented."""

from __future__ import annotations

import math
import re
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import cute_mla
from cute_mla.runtime.simulated_device import SimulatedDevice
from cute_mla.spec.arch import ARCHS
from cute_mla.spec.kernel_ops import ARCHS_OF
from cute_mla.testing.compare import same_bits
from tests.fuzz.breaking import BREAKS
from tests.fuzz.cache_subjects import CACHE_SUBJECTS
from tests.fuzz.calls import FuzzCall
from tests.fuzz.codec_subjects import CODEC_SUBJECTS
from tests.fuzz.indexer_subjects import INDEXER_SUBJECTS
from tests.fuzz.insert_subjects import INSERT_SUBJECTS
from tests.fuzz.subjects import ALLOWED_FINDINGS, DEVICE_SUBJECTS, Arguments, Subject, allowed_findings, anything
from tests.fuzz.training_subjects import TRAINING_SUBJECTS
from tests.support.recording_device import RecordingDevice

SUBJECTS: dict[str, Subject] = {
    **DEVICE_SUBJECTS,
    **CACHE_SUBJECTS,
    **INDEXER_SUBJECTS,
    **INSERT_SUBJECTS,
    **TRAINING_SUBJECTS,
    **CODEC_SUBJECTS,
}

# By the subject: the op whose kernels serve it, where its name is another one. Caches in plain torch have none.
_OPS = {
    **dict.fromkeys(("dense_prefill_kvpacked", "dense_prefill_qkvpacked"), "dense_prefill"),
    **dict.fromkeys(("fp8_mqa_logits", "fp8_paged_mqa_logits"), "mqa_logits"),
    **dict.fromkeys(("attention_head_sums", "indexer_scores"), "head_sums"),
}


def faults_of(call: FuzzCall, arguments: Arguments) -> set[str]:
    """Return the faulty arguments of a call; with them the device, if it has no kernels of the op."""
    faults = SUBJECTS[call.subject].faults(arguments, call.setting)
    archs = ARCHS_OF.get(_OPS.get(call.subject, call.subject), tuple(ARCHS.values()))
    return faults if ARCHS[call.setting.arch] in archs else {*faults, "device"}


MOST_SECONDS = 300  # of a call, on a machine that is busy with others

# What messages call an argument that they do not name: sizes by their own name, and a device by its tensors.
_SPOKEN = {
    "q": ("h_q", "tensors"),
    "qkv": ("q", "k", "v", "h_q", "tensors"),
    "kv": ("k", "v", "h_kv", "q"),
    "k_cache": ("h_kv", "page size"),
    "k": ("h_kv", "v"),
    "extra_k_cache": ("extra_indices_in_kvcache",),
    "outs": ("out", "state", "tensors"),
    "lses": ("lse", "state"),
    "cache_seqlens": ("tensors",),
    "cu_seqlens": ("cu_seqlens_qo", "cu_seqlens_kv"),
    "max_seqlen": ("max_seqlen_qo", "max_seqlen_kv"),
    "tile_scheduler_metadata": ("num_splits",),
}


# Subjects whose results may replace an operand, or a part of one.
_REPLACING = ("merge_states", "write_kv_cache", "insert_kv_cache", "write_index_cache")


class Failure(AssertionError):
    """A call did something else than what is documented."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call, as documented. message: of its error, without numbers.

    kind: "returned", "refused", "cannot be broken so", or "right", of a call that was not made.
    """

    kind: str
    message: str = ""


def judge(call: FuzzCall, *, refusals_only: bool = False) -> Outcome:
    """Make a call. Failure if it did not do what is documented, or if the judge cannot tell. refusals_only: leave right calls."""
    try:
        return _judge(call, refusals_only)
    except Failure:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise Failure(f"the judge failed: {type(error).__name__} at {place.filename}:{place.lineno}: {error}") from error


def _judge(call: FuzzCall, refusals_only: bool) -> Outcome:
    subject = SUBJECTS[call.subject]
    with _limited():
        if call.again and call.breaks:
            _after_the_right_one(call, subject)
        setting = call.setting
        with cute_mla.simulate(setting.arch, setting.sm_count, setting.schedule, setting.seed, on_finding="collect") as device:
            arguments = subject.arguments(call.case)
            broken = _broken(call, arguments)
            if broken is None:
                return Outcome("cannot be broken so")
            faults = faults_of(call, broken)
            if refusals_only and not faults:
                return Outcome("right")
            launches = device.launches
            if faults:
                outcome = _refusal(call, subject, broken, faults)
                if device.launches != launches:
                    raise Failure("a kernel was launched by a call that is refused")
                return outcome
            return _return(call, subject, broken, device)


@contextmanager
def _limited() -> Iterator[None]:
    """Failure if what is inside takes too long; in the main thread alone."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Failure(f"no end after {MOST_SECONDS} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _broken(call: FuzzCall, arguments: Arguments) -> Arguments | None:
    """Return the arguments after all breaks; None if torch cannot make one of them, or would go through 2^40 elements for it."""
    broken = dict(arguments)
    for item in call.breaks:
        value = broken.get(item.argument)
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested and value.numel() >= 1 << 40:
            return None
        try:
            broken[item.argument] = BREAKS[item.how](value, item.amount, broken)
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError, OverflowError):
            return None
    return broken


def _after_the_right_one(call: FuzzCall, subject: Subject) -> None:
    """Check that a faulty call is refused also where the right one was made just before, on a device that computes nothing.

    Memory that arguments share is looked at where a call is checked in full alone, so that says nothing here; nor does an option that
    equals the one that was checked, as 0 equals False.
    """
    if any(item.how == "alias" for item in call.breaks):
        return
    with RecordingDevice(ARCHS[call.setting.arch], call.setting.sm_count).active():
        arguments = subject.arguments(call.case)
        if faults_of(call, arguments):
            return
        subject.function(**arguments)
        broken = _broken(call, arguments)
        faults = set() if broken is None else faults_of(call, broken)
        if broken is not None and faults and not all(_is_equal(broken[name], arguments.get(name)) for name in broken):
            _refusal(call, subject, broken, faults)


def _is_equal(value: Any, other: Any) -> bool:
    plain = isinstance(value, Real) and isinstance(other, Real)
    return value is other or (plain and bool(value == other))


def _refusal(call: FuzzCall, subject: Subject, arguments: Arguments, faults: set[str]) -> Outcome:
    """Make a call that has to raise. Of several things that are wrong any may be named."""
    try:
        subject.function(**arguments)
    except ValueError as error:
        if type(error) is not ValueError:
            raise Failure(f"{type(error).__name__} instead of ValueError: {error}") from error
        _check_message(str(error), faults | {item.argument for item in call.breaks})
        return Outcome("refused", pattern(str(error)))
    except Failure:
        raise
    except cute_mla.DeviceError:
        if "device" not in faults:
            raise
        return Outcome("refused", "no such device")
    except Exception as error:
        raise Failure(f"{type(error).__name__} instead of ValueError, at fault {sorted(faults)}: {error}") from error
    raise Failure(f"accepted, though at fault: {sorted(faults)}")


def _check_message(message: str, faults: set[str]) -> None:
    if "supported" not in message:
        raise Failure(f"does not say what is supported: {message}")
    spoken = {word for name in faults for word in (name, *_SPOKEN.get(name, ()))}
    if not any(re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", message) for word in spoken):
        raise Failure(f"names none of {sorted(faults)}: {message}")


def pattern(message: str) -> str:
    """Return a message without what differs from call to call."""
    first = message.splitlines()[0] if message else ""
    first = re.sub(r" is .*?; supported", " is _; supported", first)
    first = re.sub(r"\[[^\]]*\]", "[_]", first)
    return re.sub(r"0x[0-9a-f]+|-?\d[\d.e+]*", "#", first)[:160]


def _return(call: FuzzCall, subject: Subject, arguments: Arguments, device: SimulatedDevice) -> Outcome:
    """Make a call that has to return, twice if it is to be made again."""
    verify = subject.expect(arguments, call.setting)
    if verify in (anything, *ALLOWED_FINDINGS) and not call.breaks:
        raise Failure("the judge knows nothing of a right call")
    written = _written(call.subject, arguments)
    if call.subject not in _REPLACING:
        for tensor in written:
            tensor.detach().fill_(math.nan if tensor.is_floating_point() else 0)
    memory = _Memory(arguments)
    try:
        results = subject.function(**arguments)
        kept = _copies(results)
        complaint = verify(results)
        if not complaint and call.again and not call.breaks and not _in_place(call):
            complaint = _differences(kept, _copies(subject.function(**arguments)))
    except Failure:
        raise
    except Exception as error:
        if "allocate memory" in str(error) and any(item.how == "enormous" for item in call.breaks):
            return Outcome("refused", "more memory than there is")  # torch's error
        raise Failure(f"{type(error).__name__}, though nothing is at fault: {error}") from error
    allowed = allowed_findings(verify, arguments)
    found = [str(finding) for finding in device.findings if finding.kind not in allowed]
    complaint = "; ".join(found) or complaint or memory.damage(written)
    if complaint:
        raise Failure(complaint)
    return Outcome("returned")


def _in_place(call: FuzzCall) -> bool:
    return bool(getattr(call.case, "in_place", False))


def _written(subject: str, arguments: Arguments) -> list[Tensor]:
    results: tuple[str, ...] = (
        ("dq", "dk", "dv", "dkv", "d_sink", "dweights")
        if "dout" in arguments or "dscores" in arguments
        else ("out", "lse", "max_logits", "lse_indexer", "out_weights")
    )  # the backward pass reads out and lse
    if subject == "attention_head_sums":
        results = ("out",)  # lse is read
    inserted = ("k_cache", "q_pe", "keys") if "kv_c" in arguments else ("index_cache",) if "norm_bias" in arguments else ()
    names = (*results, "workspace", *inserted)
    return [value for name in names if isinstance(value := arguments.get(name), Tensor)]


def _copies(results: Any) -> tuple[Tensor, ...]:
    found = results if isinstance(results, tuple) else (results,)
    return tuple(result.clone() for result in found if isinstance(result, Tensor))


def _differences(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> str:
    alike = all(same_bits(x, y) if x.is_floating_point() else torch.equal(x, y) for x, y in zip(first, second, strict=True))
    return "" if alike else "other bits when made again"


class _Memory:
    """All that arguments lie in, as it was before a call."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}
        values = [item for value in arguments.values() for item in (value if isinstance(value, list | tuple) else (value,))]
        for value in values:
            if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu" and not value.is_nested:
                storage = _storage(value)
                self._storages.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def damage(self, written: list[Tensor]) -> str:
        """Return whether anything but the written tensors has changed. They are set to zero."""
        for tensor in written:
            _, before = self._storages[_storage(tensor).data_ptr()]
            tensor.detach().zero_()
            view = torch.empty(0, dtype=tensor.dtype).set_(before.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            view.zero_()
        changed = any(not torch.equal(storage, before) for storage, before in self._storages.values())
        return "memory that is not a result's was written" if changed else ""


def _storage(tensor: Tensor) -> Tensor:
    """Return the bytes of the storage that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
