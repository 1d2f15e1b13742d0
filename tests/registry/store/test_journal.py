"""The journal: what it holds, what it forgives (a torn last line) and what it refuses, with line numbers."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.registry.errors import InputError
from kernelmark.registry.store import journal as module
from kernelmark.registry.store.journal import Writer, encode, parse, read
from kernelmark.registry.store.record import Ceiling, Header, Measurement, Record, Request

SCHEMA = Path(module.__file__).with_name("journal.schema.json")


def lines(literal: Any, *more: Any) -> bytes:
    return b"".join(encode(x) for x in (literal.header(), *more))


def write(path: Path, *found: Any) -> None:
    with Writer(path) as writer:
        for x in found:
            writer.write(x)


# --- round trip ---------------------------------------------------------------------------------------


def test_what_is_written_is_read(literal: Any, tmp_path: Path) -> None:
    record, ceiling, footer = literal.record("torch", [1.0, 2.0]), Ceiling("copy", 8, 0.5, 0), literal.footer()
    path = tmp_path / "deep" / "run.jsonl"
    write(path, literal.header(), record, ceiling, footer)
    found = read(path)
    assert (found.header, found.records, found.ceilings, found.footers) == (
        literal.header(),
        (record,),
        (ceiling,),
        (footer,),
    )
    assert (found.torn, found.path) == (False, path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 10**23}, "run .* cannot be recorded, no journal may hold this: "),
        ({"replicates": 200_000}, "replicates: 200000 is not within"),
        ({"request": Request(deadline_s=1e8)}, "deadline_s: no length of time"),
        ({"plan": "p" * 251}, "plan: .* is no name"),
        ({"conditions": {"gpu": None, "x": [1]}}, "cannot be recorded"),
    ],
)
def test_a_header_that_no_reader_takes_is_not_written(
    literal: Any, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(InputError, match=said):
        write(path, msgspec.structs.replace(literal.header(), **changed))
    assert path.read_bytes() == b""


def test_a_board_stands_in_the_lines_that_have_one(literal: Any) -> None:
    record, ceiling = literal.record(), Ceiling("copy", 8, 0.5, 0)
    assert b'"board"' not in encode(record) + encode(ceiling)  # older kernelmarks read it
    moved = msgspec.structs.replace(record, board="b0", replicate=1)
    found = parse(lines(literal, record, moved, msgspec.structs.replace(ceiling, board="b0")))
    assert [x.board for x in (*found.records, *found.ceilings)] == [msgspec.UNSET, "b0", "b0"]
    with pytest.raises(InputError, match="board: .* is no name"):
        parse(lines(literal, msgspec.structs.replace(record, board="a\x1bb")))


def test_a_compressed_journal_is_read(literal: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(gzip.compress(lines(literal, literal.record())))
    assert len(read(path).records) == 1


def test_the_pass_is_called_pass_in_the_file(literal: Any) -> None:
    assert json.loads(encode(literal.record()))["case"]["pass"] == "forward"


def test_every_line_names_its_kind(literal: Any) -> None:
    for line, kind in (
        (literal.header(), "header"),
        (literal.record(), "record"),
        (Ceiling("copy", 8, 0.5, 0), "ceiling"),
        (literal.footer(), "footer"),
    ):
        assert json.loads(encode(line))["kind"] == kind


# --- a torn last line ---------------------------------------------------------------------------------


def test_a_torn_last_line_costs_that_line_only(literal: Any) -> None:
    whole = lines(literal, literal.record())
    torn = encode(literal.record(replicate=1))
    for cut in (1, len(torn) // 2, len(torn) - 3):
        found = parse(whole + torn[:cut])
        assert found.torn
        assert [x.replicate for x in found.records] == [0]


def test_a_tail_of_zeros_after_a_power_cut_is_a_torn_line(literal: Any) -> None:
    found = parse(lines(literal, literal.record()) + b"\0" * 100)
    assert found.torn
    assert len(found.records) == 1


def test_a_tail_torn_inside_a_character_is_a_torn_line(literal: Any) -> None:
    assert parse(lines(literal) + b'{"kind":"recor\xe2\x80"}').torn


def test_a_whole_last_line_without_a_newline_counts(literal: Any) -> None:
    found = parse(lines(literal, literal.record())[:-1])
    assert not found.torn
    assert len(found.records) == 1


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_mending_cuts_a_torn_line_off_before_appending(literal: Any, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "run.jsonl"
    torn = encode(literal.record(replicate=1))
    path.write_bytes(lines(literal, literal.record()) + torn[:cut])
    write(path, literal.record(replicate=2))
    found = read(path)
    assert not found.torn
    # Only the newline was missing with the last cut: that line is whole and stays.
    assert [x.replicate for x in found.records] == ([0, 1, 2] if cut == -1 else [0, 2])


def test_mending_leaves_a_whole_journal_as_it_is(literal: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, literal.header(), literal.record())
    before = path.read_bytes()
    Writer(path).close()
    assert path.read_bytes() == before


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        b"not json",
        b"{}",
        b'{"kind":"nope"}',
        b'{"kind":"ceiling","what":"copy","size":8,"time_ms":1.0,"replicate":0,"extra":1}',
        b'{"kind":"ceiling","what":"copy","size":8,"time_ms":0,"replicate":0}',
        b'{"kind":"recor\xff"}',
        b"\xff\xfe\x00",
    ],
)
def test_a_bad_line_in_the_middle_is_an_error_with_its_number(literal: Any, bad: bytes) -> None:
    with pytest.raises(InputError, match=r"x\.jsonl: line 3: ") as caught:
        parse(lines(literal, literal.record()) + bad + b"\n" + encode(literal.footer()), Path("x.jsonl"))
    assert caught.value.exit_code == 2


def test_line_numbers_count_blank_lines(literal: Any) -> None:
    with pytest.raises(InputError, match="line 4: "):
        parse(lines(literal) + b"\n\nnonsense\n")
    with pytest.raises(InputError, match="line 3 is a second header"):
        parse(lines(literal) + b"\n" + lines(literal))


def test_blank_lines_are_passed_over(literal: Any) -> None:
    assert len(parse(lines(literal) + b"\n  \n" + encode(literal.record())).records) == 1


@pytest.mark.parametrize("text", [b"", b"\n", b"no newline", b"\n\n\n", b"root:x:0:0\n", b'{"times": [1.0]}\n'])
def test_what_is_no_journal_is_said_to_be_none(text: bytes) -> None:
    with pytest.raises(InputError, match="not a kernelmark journal"):
        parse(text)


def test_a_journal_must_begin_with_its_header(literal: Any) -> None:
    with pytest.raises(InputError, match="line 1 is not a header"):
        parse(encode(literal.record()) + lines(literal))


def test_two_journals_in_one_file_are_refused(literal: Any) -> None:
    with pytest.raises(InputError, match="line 3 is a second header: two journals in one file"):
        parse(lines(literal, literal.record()) + lines(literal))


def test_a_newer_schema_says_what_to_do_even_if_its_header_decodes(literal: Any) -> None:
    newer = encode(literal.header(schema_version=99))
    with pytest.raises(
        InputError, match=r"line 1: written with journal schema 99.*reads up to 2.*newer kernelmark"
    ):
        parse(newer + encode(literal.record()))


def test_a_newer_schema_is_told_before_the_fields_it_added(literal: Any) -> None:
    newer = encode(literal.header(schema_version=3)).replace(b'"run"', b'"new_field":1,"run"')
    with pytest.raises(InputError, match="line 1: written with journal schema 3"):
        parse(newer)


def test_a_missing_journal(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no journal at"):
        read(tmp_path / "none.jsonl")


def test_a_folder_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("damage", ["not gzip", "cut", "flipped"])
def test_a_damaged_compressed_journal_is_a_message(literal: Any, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "run.jsonl.gz"
    good = gzip.compress(lines(literal, *(literal.record(replicate=i) for i in range(50))))
    flipped = bytearray(good)
    flipped[20:60] = b"\xff" * 40
    path.write_bytes({"not gzip": b"plain", "cut": good[:40], "flipped": bytes(flipped)}[damage])
    with pytest.raises(InputError, match="cannot be read"):
        read(path)


@settings(max_examples=150)
@given(st.binary(max_size=80), st.integers(0, 3))
def test_no_bytes_bring_anything_but_a_journal_or_a_message(noise: bytes, place: int) -> None:
    good = encode(
        Header(1, "r", "2026", "0", None, False, "quick", 1, 1, "cpu", "k", {}, {}),
    )
    text = {0: noise, 1: good + noise, 2: good + noise + b"\n" + good, 3: noise + b"\n" + good}[place]
    with contextlib.suppress(InputError):
        assert parse(text).header.run == "r"


# --- records --------------------------------------------------------------------------------------------


def test_a_measurement_recorded_twice_counts_once_and_the_first_one_does(literal: Any) -> None:
    found = parse(lines(literal, literal.record(samples=1.0), literal.record(samples=2.0)))
    (record,) = found.records
    assert record.measurement is not None
    assert record.primary == (1.0, 1.0, 1.0)


def test_records_that_differ_in_any_part_of_their_identity_are_all_kept(literal: Any) -> None:
    different = [
        literal.record(),
        literal.record(replicate=1),
        literal.record("liger"),
        literal.record(cache="hot"),
        literal.record(case=literal.case(name="other")),
        literal.record(case=literal.case(operator="gelu")),
    ]
    assert len(parse(lines(literal, *different)).records) == len(different)


def test_a_record_has_a_measurement_exactly_when_it_is_ok(literal: Any) -> None:
    good = literal.record()
    with pytest.raises(ValueError, match="exactly when"):
        msgspec.structs.replace(good, status="timeout", reason="60 s")
    with pytest.raises(ValueError, match="exactly when"):
        msgspec.structs.replace(good, measurement=None)


def test_a_failure_needs_a_reason(literal: Any) -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        literal.record(status="timeout", reason="")


@pytest.mark.parametrize("samples", [(), (float("nan"),), (1.0, float("inf"))])
def test_samples_that_could_not_be_read_back_are_refused(samples: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="samples of 'latency'"):
        Measurement({"latency": samples}, "events")


def test_a_measurement_has_samples_of_what_its_case_is_judged_by(literal: Any) -> None:
    with pytest.raises(ValueError, match="no samples of 'loss', the metric that the case is judged by"):
        literal.record(case=literal.case(primary="loss"))


def test_results_are_frozen(literal: Any) -> None:
    record: Record = literal.record()
    with pytest.raises(AttributeError, match="immutable"):
        record.status = "error"  # type: ignore[misc]


# --- disk -----------------------------------------------------------------------------------------------

FULL = """
import resource, sys
from pathlib import Path
from kernelmark.registry.store.journal import Writer, encode, parse
from kernelmark.registry.store.record import Ceiling

path, kept = Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + kept, resource.RLIM_INFINITY))
writer = Writer(path)
for i in range(1000):
    try:
        writer.write(Ceiling("copy", 8, 0.5, i))
    except OSError as error:
        print(i, error.errno)
        break
"""


@pytest.mark.parametrize("room", [0, 10, 1000])
def test_a_full_disk_leaves_every_whole_line_and_no_torn_one(literal: Any, tmp_path: Path, room: int) -> None:
    path = tmp_path / "run.jsonl"
    write(path, literal.header())
    command = [sys.executable, "-c", FULL, str(path), str(room)]
    written, errno = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(errno) > 0
    found = read(path)
    assert not found.torn
    assert [x.replicate for x in found.ceilings] == list(range(int(written)))
    assert path.read_bytes().endswith(b"\n")


def test_a_short_write_is_a_full_disk(literal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    writer = Writer(path)
    writer.write(literal.header())
    real = writer._file

    class Short:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def write(self, data: bytes) -> int:
            return real.write(data[:5])

    monkeypatch.setattr(writer, "_file", Short())
    with pytest.raises(OSError, match="No space left"):
        writer.write(literal.record())
    writer.close()
    assert read(path).records == ()


def test_each_line_is_in_the_file_when_write_returns(literal: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Writer(path) as writer:
        writer.write(literal.header())
        assert read(path).header == literal.header()
        writer.write(literal.record())
        assert len(read(path).records) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(literal: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        Writer(tmp_path / "run.jsonl")


# --- the schema -----------------------------------------------------------------------------------------


def test_the_schema_file_is_the_one_of_this_code() -> None:
    hint = "write it anew: python -m kernelmark.registry.store.journal > registry/store/journal.schema.json"
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == json.loads(json.dumps(module.schema())), hint


def test_the_module_prints_its_schema() -> None:
    command = [sys.executable, "-m", "kernelmark.registry.store.journal"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
    assert printed == SCHEMA.read_text(encoding="utf-8")


def test_the_schema_describes_every_kind_of_line() -> None:
    told: Any = module.schema()
    assert set(told["discriminator"]["mapping"]) == {"header", "record", "ceiling", "launches", "footer"}
    assert told["$defs"]["Case"]["additionalProperties"] is False
    assert "pass" in told["$defs"]["Case"]["properties"]


def test_a_lean_journal_has_the_same_rows(make_journal, write, tmp_path):
    """Samples take a quarter of the memory, and give the same figures to the last digit."""
    from kernelmark.registry.analysis.rows import rows

    path = write(make_journal(), tmp_path / "run.jsonl")
    whole, lean = read(path), read(path, lean=True)
    assert rows(lean) == rows(whole)
    (first, *_), (same, *_) = lean.records, whole.records
    assert tuple(first.measurement.samples["latency"]) == same.measurement.samples["latency"]
    assert type(first.measurement.samples["latency"]).__name__ == "array"


@pytest.mark.parametrize(
    ("sessions", "seconds"),
    [
        ([], None),
        ([("00:01:00Z", 60.0)], 60.0),
        ([("00:01:00Z", 60.25), ("00:02:00Z", 59.5)], 119.75),  # resumed at once; ends are known to a second
        ([("00:01:00Z", 30.0), ("00:05:00Z", 30.0)], 60.0),  # and much later
        ([("00:01:00Z", 54.0), ("00:01:02Z", 48.0), ("00:01:01+00:00", 50.0)], 56.0),  # shards side by side
        ([("00:01:00Z", 50.0), ("00:00:40Z", 10.0)], 50.0),  # one within another
        ([("whenever", 10.0), ("00:01:00", 5.0)], 15.0),
    ],
)
def test_time_that_sessions_share_counts_once(literal, sessions, seconds):
    footers = [
        literal.footer(ended=x if x == "whenever" else f"2026-11-21T{x}", wall_s=wall) for x, wall in sessions
    ]
    assert literal.journal(*footers).elapsed_s == seconds
