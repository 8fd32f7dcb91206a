"""`cute-mla profile`: what it prints, writes and exits with, where there is no GPU and with planned outcomes of one."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner, Result

from cute_mla.aot_build import variants
from cute_mla.cli import commands
from cute_mla.cli.profile import GPUS, OPS, succeeded
from cute_mla.manifest import Manifest
from cute_mla.profiles import predictions, report, roofline
from cute_mla.profiles.clock import timeline
from cute_mla.profiles.clock.recorded import Recorded
from cute_mla.profiles.kernel_stats.static_report import MIX_CLASSES
from cute_mla.profiles.launches.launch import NoLaunchError
from cute_mla.profiles.rows import DEFINITIONS, Case
from cute_mla.runtime.artifacts import FOLDER_VARIABLE
from cute_mla.spec.kernel_ops import KERNEL_OPS
from tests.profiles.clock.recordings import recorded
from tests.support.kernel_entries import kernel_entry

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


# of format 3, since the analytic model filled them
KEYS_OF_A_MODEL = {
    *("kernel", "low_us", "high_us", "binds", "fraction_of_roof", "best", "worst", "measured_us", "error"),
    *("block", "ctas", "parts", "blocks_of_the_longest", "pieces_of_it", "combine"),
}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["profile", *map(str, arguments)])


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the manifest of one kernel."""
    folder = tmp_path / "artifacts"
    block, instructions = (512, 1, 1), {"HGMMA": 44, "UTMALDG": 9}
    entry = kernel_entry("dense_decode", "sm90", "bf16_cluster1", block=block, smem_bytes=223_000, instructions=instructions)
    Manifest({entry.name: entry}).save(folder)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


def test_model_shows_static_figures(artifacts: Path) -> None:
    result = run("--device", "model", "--op", "dense_decode")
    assert result.exit_code == 0
    header, row = (line.split() for line in result.output.splitlines()[:2])
    assert (row[0], row[header.index("registers")]) == ("dense_decode_sm90_bf16_cluster1", "128")
    assert dict(zip(header[-11:], row[-11:], strict=True)) == dict.fromkeys(MIX_CLASSES, "0") | {"tensor": "44", "tma": "9"}


def test_rows_are_predicted_without_static_figures(artifacts: Path, tmp_path: Path) -> None:
    json_file, plot_file = tmp_path / "sub" / "profile.json", tmp_path / "plot.svg"
    result = run("--device", "model", "--rows", "D1.fixed,C1", "--json", json_file, "--plot", plot_file)
    assert result.exit_code == 0
    assert result.output.startswith("H200: clocks of an SM for a block of keys\n")
    assert "Predicted by the clock of profiles/clock from the kernels' machine code, not measured" in result.output
    lines = result.output.splitlines()
    block = lines[lines.index("H200: clocks of an SM for a block of keys") + 2].split()
    assert block[0] == "dense_decode_sm90_bf16_cluster2"
    line = predictions.recorded()["D1.fixed H200"]
    assert [int(clocks) for clocks in block[1].split("-")] == [round(line[end][0][0]) for end in ("fast", "slow")]
    predicted = next(line.split() for line in lines[lines.index("H200: microseconds of a call") :] if line.startswith("D1.fixed"))
    document = json.loads(json_file.read_text())
    assert (document["format"], document["device"]) == (3, "model")
    assert [row["name"] for row in document["rows"]] == ["D1.fixed", "C1.two", "C1.many"]
    assert document["rows"][0]["roofs"]["H200"] == {"us": pytest.approx(184.85, abs=0.01), "bound": "compute"}
    model = document["rows"][0]["model"]["H200"]
    assert predicted[5:7] == ["184.8", f"{model['us']:.1f}"]
    assert 200 < model["low_us"] < model["us"] < model["high_us"] < 250
    assert (model["measured_us"], model["error"]) == (None, None)
    assert model["block"]["flops"] == {"S": 64 * 64 * 576 * 2, "P V": 64 * 512 * 64 * 2}
    assert model["best"]["clocks"]["tensor core"] > 2176 * 0.9
    assert model.keys() >= KEYS_OF_A_MODEL
    assert sum(model["worst"]["terms"].values()) == pytest.approx(model["high_us"])
    assert document["machines"]["H200"]["sources"]["launch_us"]
    assert document["kernels"][0]["smem_share"] == pytest.approx(0.959, abs=0.001)
    assert ElementTree.parse(plot_file).getroot().tag.endswith("svg")


def test_model_without_artefacts_still_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    result = run("--device", "model", "--op", "combine")
    assert result.exit_code == 0
    assert f"no static report: no manifest.json in {tmp_path}" in result.output
    assert "C1.two" in result.output


def test_an_op_without_rows_has_its_static_report_only(artifacts: Path) -> None:
    result = run("--device", "model", "--op", "split_plan")
    assert result.exit_code == 0
    assert "no split_plan was built for sm90" in result.output
    assert "no benchmark rows chosen" in result.output


def test_rows_of_several_ops(artifacts: Path) -> None:
    result = run("--device", "model", "--op", "sparse_prefill", "--op", "dense_decode", "--rows", "D1,P1")
    assert result.exit_code == 0, result.output
    assert "D1" in result.output
    assert "P1" in result.output


def test_every_row_of_the_definitions_is_within_reach(artifacts: Path) -> None:
    """The list of rows is read off the files."""
    written = [
        (document["op"], row["name"])
        for document in map(tomllib.loads, (path.read_text() for path in sorted(DEFINITIONS.glob("*.toml"))))
        if "row" in document
        for row in document["row"]
    ]
    assert {"D1", "K1", "M1"} <= {row for _, row in written}
    assert {op for op, _ in written} <= set(OPS)
    # kernels that rows of other ops launch, or that have no row
    backward = ("dense_prefill_backward", "sparse_prefill_backward")
    launched = (op for op, kernels in KERNEL_OPS.items() if {*(kernels.callers or ())} & {*backward})
    without_rows = {"masked_prefill", *launched}
    assert set(OPS) - {*backward, "indexer_topk"} == set(variants.OPS) - without_rows
    for op, row in written:
        assert {case.row for case in report.cases_for([op], [row])} == {row}


def test_one_gpu_is_shown_unless_more_are_asked_for(artifacts: Path) -> None:
    assert set(GPUS) == set(roofline.GPUS)
    tables = {f"{gpu}: microseconds" for gpu in GPUS}
    two = ["--gpu", "B200", "--gpu", "H100"]
    asked: tuple[tuple[list[str], set[str]], ...] = (
        ([], {"H200"}),
        (["--arch", "sm100"], {"B200"}),
        (["--arch", "sm120"], {"RTX PRO 6000"}),
        (["--gpu", "GB10", "--gpu", "RTX 5090"], {"RTX 5090", "GB10"}),
        (["--gpu", "all"], set(GPUS)),
        (two, {"B200", "H100"}),
    )
    for arguments, shown in asked:
        output = run("--device", "model", "--rows", "D1.fixed", *arguments).output
        assert {table.split(":")[0] for table in tables if table in output} == shown
    result = run("--device", "model", "--arch", "sm90", "--gpu", "B200")
    assert result.exit_code == 2
    assert "B200 does not run kernels of sm90; supported: H200, H100, H800" in result.output


def test_goals_have_a_table_of_their_own(artifacts: Path) -> None:
    lines = run("--device", "model", "--rows", "D1.fixed,C2.decode").output.splitlines()
    header = lines.index("H200: goals in microseconds") + 1
    assert lines[header].split() == ["row", "problem", "goal", "us", "predicted", "us", "within", "the", "goal"]
    assert lines[header + 1].startswith("D1.fixed")
    assert lines[header + 2] == ""
    assert "goal" not in "".join(lines[: header - 1])


@pytest.mark.parametrize("option", ["--json", "--plot", "--timeline"])
@pytest.mark.parametrize("place", ["file/profile.json", "x" * 256, f"{'x' * 256}/profile.json", "."])
def test_a_file_that_cannot_be_written_is_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, place: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(report, "cases_for", lambda *_: pytest.fail("work began"))
    result = run(option, tmp_path / place)
    assert result.exit_code == 2
    assert option in result.output


def test_the_plot_is_of_the_gpu_that_is_shown(artifacts: Path, tmp_path: Path) -> None:
    assert run("--device", "model", "--rows", "D1.fixed", "--gpu", "B200", "--plot", tmp_path / "plot.svg").exit_code == 0
    assert "roofline of a B200" in (tmp_path / "plot.svg").read_text()


@no_gpu
def test_auto_without_a_gpu_says_that_nothing_is_timed(artifacts: Path) -> None:
    result = run("--rows", "D5")
    assert result.exit_code == 0
    assert "no CUDA GPU is available to torch: static report and predictions only" in result.output


@no_gpu
def test_cuda_without_a_gpu_fails_with_one_line_and_leaves_json(artifacts: Path, tmp_path: Path) -> None:
    json_file = tmp_path / "profile.json"
    result = run("--device", "cuda", "--json", json_file)
    assert result.exit_code == 1
    assert result.output.strip() == "Error: no CUDA GPU is available to torch"
    assert json.loads(json_file.read_text())["error"] == "no CUDA GPU is available to torch"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "D1,D99"), "no row or case named D99"),
        (("--op", "split_plan", "--rows", "D1"), "split_plan has no benchmark rows"),
        (("--device", "tpu"), "'tpu' is not one of"),
        (("--budget", "-1"), "-1"),
        (("--budget", "nan"), "nan is not a finite number"),
        (("--budget", "inf"), "inf is not a finite number"),
        (("--row-seconds", "0"), "0"),
        (("--rows", ""), "--rows: '' names no row"),
        (("--rows", ","), "--rows: ',' names no row"),
    ],
)
def test_bad_usage_exits_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["timed", "not_run"], True),
        (["timed", "wrong"], False),
        (["timed", "failed"], False),
        (["timed", "hung"], False),
        (["not_run"], False),
        ([], False),
    ],
)
def test_a_timed_run_succeeds_if_something_was_timed_and_nothing_was_wrong(states: list[str], expected: bool) -> None:
    assert succeeded({"device": "cuda", "rows": [{"status": state} for state in states]}) is expected


def timed_document(**changes: Any) -> dict[str, Any]:
    row = {
        "row": "D1", "name": "D1.fixed", "op": "dense_decode", "text": "b128 L4096 h128 s1", "status": "timed", "reason": "",
        "goal_us": 210, "cold_us": {"median": 222.25, "p10": 220.0, "p90": 225.0},
        "control_ratio": {"median": 1.001, "p10": 1.0, "p90": 1.01},
        "kernel_us": {"dense_decode": 215.0}, "intensity": 228.0, "rate": 1.0, "tflops": 657.0, "gbytes_per_s": 2878.0, "limit_us": 187.0,
        "fraction_of_limit": 0.841, "shape": {"lengths": [4096] * 128, "h_q": 128, "s_q": 1, "operands": "latent"},
        "peers": {
            "FlashMLA": {"status": "timed", "reason": "", "us": {"median": 250.0}, "ratio": {"median": 0.889}},
            "FA3": {"status": "absent", "reason": "not installed: No module named 'fa3_fwd_interface'"},
            "Wrong": {"status": "wrong", "reason": "out[0]: 3 of 4 elements out of bounds"},
        }, **changes,
    }  # fmt: skip
    left = {"name": "C1.two", "op": "combine", "status": "not_run", "reason": "the budget of 1 s was used up"}
    return {"device": "cuda", "kernels": [], "kernels_missing": "none", "environment": {"gpu": "NVIDIA H200"}, "rows": [row, left]}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for a GPU that gave timed_document()."""
    from cute_mla.profiles import report
    from cute_mla.profiles.measure import cuda_bench

    monkeypatch.setattr(cuda_bench, "matching_arch", lambda archs: archs[0])
    monkeypatch.setattr(report, "cuda_document", lambda *args: timed_document())


@pytest.mark.usefixtures("gpu")
def test_timings_are_shown_and_what_was_not_run_is_named(tmp_path: Path) -> None:
    plot_file = tmp_path / "plot.svg"
    result = run("--plot", plot_file)
    assert result.exit_code == 0
    for text in ("NVIDIA H200: 1 rows timed", "222.2", "84.1", "C1.two not run: the budget of 1 s was used up"):
        assert text in result.output
    assert "filled: measured" in plot_file.read_text()


@pytest.mark.usefixtures("gpu")
def test_peers_are_columns_if_they_were_timed_and_reasons_if_not() -> None:
    result = run()
    header, row = [line for line in result.output.splitlines() if line.startswith(("row", "D1.fixed"))][:2]
    assert header.split("  ")[-1] == "/ FlashMLA"
    assert row.split()[-1] == "0.889"
    assert "/ FA3" not in result.output
    assert "FA3 absent in D1.fixed: not installed: No module named 'fa3_fwd_interface'" in result.output
    assert "Wrong wrong in D1.fixed: out[0]: 3 of 4 elements out of bounds" in result.output


@pytest.mark.usefixtures("gpu")
def test_numbers_that_json_does_not_have_are_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_mla.profiles import report

    monkeypatch.setattr(report, "cuda_document", lambda *args: timed_document(check={"out_max_abs": float("nan"), "requests": (0, 1)}))
    json_file = tmp_path / "profile.json"
    assert run("--json", json_file).exit_code == 0
    assert json.loads(json_file.read_text())["rows"][0]["check"] == {"out_max_abs": "nan", "requests": [0, 1]}


def test_clock_predicts_rows_beside_roofline(tmp_path: Path) -> None:
    json_file = tmp_path / "clock.json"
    result = run("--device", "clock", "--rows", "K1.656_128", "--json", json_file)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    header = lines[lines.index("H200: predicted microseconds of a call") + 1]
    assert "roof us" in header
    row = lines[lines.index(header) + 1].split()
    assert row[0] == "K1.656_128"
    assert "Predicted by the clock of profiles/clock" in result.output
    assert "For other GPUs than H200: --gpu NAME" in result.output
    assert "not measured" in result.output
    document = json.loads(json_file.read_text())
    found = document["rows"][0]["clock"]["H200"]
    assert found["low_us"] <= found["us"] <= found["high_us"]
    assert (document["format"], document["device"]) == (1, "clock")
    assert document["rows"][0]["model"]["H200"] == {key: pytest.approx(found[key], rel=0.02) for key in ("low_us", "high_us")}
    assert document["constants"]["H200"]["fast"]["launch_us"] <= document["constants"]["H200"]["slow"]["launch_us"]


def test_clock_refuses_what_it_does_not_know(artifacts: Path, tmp_path: Path) -> None:
    launch = tmp_path / "launch.json"
    launch.write_text("{}")
    wrong: list[tuple[list[str | Path], str]] = [
        (["--gpu", "H2000"], "not supported: H2000; supported: H200"),
        (["--rows", "D99"], "no row or case named D99"),
        (["--plot", tmp_path / "x.svg"], "--device clock draws nothing"),
        (["--peer-cubin", launch], "--peer-cubin, --peer-launch and --device clock belong together"),
        (["--peer-launch", launch, "--peer-cubin", tmp_path / "none.cubin"], "the description: grid is missing"),
    ]
    for arguments, message in wrong:
        result = run("--device", "clock", *([] if "--rows" in arguments else ["--rows", "K1.656_1"]), *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.output
    result = run("--device", "model", "--peer-cubin", launch, "--peer-launch", launch)
    assert result.exit_code == 2


def test_clock_fails_if_it_can_time_no_row(artifacts: Path) -> None:
    result = run("--device", "clock", "--rows", "D12.h128")
    assert result.exit_code == 1
    assert "D12.h128: dense_decode_sm90_bf16_cluster2 is not built" in result.output


def test_clock_fails_if_it_cannot_time_the_peer(artifacts: Path, tmp_path: Path) -> None:
    launch, cubin = tmp_path / "launch.json", tmp_path / "kernel.cubin"
    launch.write_text('{"grid": [1, 1, 1], "block": [32, 1, 1], "parameters": []}')
    cubin.write_bytes(b"no cubin")
    result = run("--device", "clock", "--op", "split_plan", "--peer-cubin", cubin, "--peer-launch", launch)
    assert result.exit_code == 1
    assert "launch: not a 64-bit ELF file" in result.output
    assert "Traceback" not in result.output


def test_a_timeline_has_a_process_for_each_cta_of_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(case: Case, gpu: str) -> Recorded:
        if case.name == "D2.fixed":
            raise NoLaunchError("no loop over keys")
        assert gpu == "H100"
        return recorded(case.name)

    monkeypatch.setattr(timeline, "record_case", record)
    monkeypatch.setattr(report, "clock_of", lambda case, gpu: {"reason": "not timed here"})
    path = tmp_path / "new" / "trace.json"
    result = run("--device", "clock", "--arch", "sm90", "--gpu", "H100", "--rows", "D1.fixed,D2.fixed,D1.varlen", "--timeline", path)
    assert "--timeline: D2.fixed is left out: no loop over keys" in result.output
    assert "--timeline: no tables of one kind" in result.output
    events = json.loads(path.read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == [f"{case}: k on H200, CTA {rank}" for case in ("D1.fixed", "D1.varlen") for rank in range(2)]


def test_a_timeline_needs_the_clock(tmp_path: Path) -> None:
    result = run("--device", "model", "--timeline", tmp_path / "trace.json")
    assert result.exit_code == 2
    assert "--timeline needs --device clock; given: --device model" in result.output
