"""Tables that people bring: CSV, TSV, JSON lines and Parquet, read strictly, their columns by name."""

import csv
import glob
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.errors import UserError

UNPACKED_BYTES = 2**26  # a Parquet file may always unpack to this, and above it to a hundred times its size
BATCH_ROWS = 32  # so few, since each may hold a value as large as the footer allows


class Record(NamedTuple):
    """One row: where it stands, such as "reviews.csv, line 3", and what its columns hold."""

    place: str
    values: dict[str, Any]


def read_records(
    path: Path, columns: Iterable[str], where: dict[str, str], encoding: str = "utf-8"
) -> list[Record]:
    """Read, in order, the rows whose columns, as `spelled`, equal `where`.

    The name's ending gives the format: .csv, .tsv (quoted like CSV), .jsonl, .parquet. Each row read has at
    least `columns`; those that `where` leaves out need not, in JSON lines. A byte order mark, empty lines and
    any line end are accepted. A row is named by the line it starts on, or by its number in Parquet, from 1.
    Raises `UserError` naming file, row and value for anything else that is not a sound table.
    """
    readers = {".csv": _csv, ".tsv": _tsv, ".jsonl": _json_lines, ".parquet": _parquet}
    read = readers.get(path.suffix.lower())
    if read is None:
        raise UserError(f"{path.name}: expected a name that ends in .csv, .tsv, .jsonl or .parquet")
    found = []
    for record in read(path, (*columns, *where), encoding):
        _require(record.place, record.values, where)
        if all(spelled(record.values[name]) == value for name, value in where.items()):
            _require(record.place, record.values, columns)
            found.append(record)
    if not found:
        raise UserError(f"{path.name}: no row" + (f" where {where}" if where else ""))
    return found


def spelled(value: Any) -> str | None:
    """Write a table's value as text, a truth value as JSON does; None where it is missing."""
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(value: Any) -> str:
    """Write a value for a message: as Python does, on one line, cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _require(place: str, present: Iterable[str], names: Iterable[str]) -> None:
    for name in names:
        if name not in present:
            raise UserError(f"{place}: no column {name!r}: it has {shown(list(present))}")


def _check_header(place: str, header: list[str], names: Iterable[str]) -> None:
    for name in header:
        if header.count(name) > 1:
            raise UserError(f"{place}: two columns are called {shown(name)}")
    _require(place, header, names)


def _lines(path: Path, encoding: str) -> Iterator[str]:
    """Yield lines with their ends: \\n, \\r\\n or \\r, none of the others that `str.splitlines` knows."""
    raw = path.read_bytes()
    if b"\0" in raw:
        line = _line_number(raw, raw.index(b"\0"))
        raise UserError(f"{path.name}, line {line}: a NUL byte: expected text in {encoding}")
    try:
        text = raw.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        line, byte = _line_number(error.object, error.start), error.object[error.start]
        raise UserError(
            f"{path.name}, line {line}: byte 0x{byte:02x} is not {encoding}; latin-1 must be asked for"
        ) from None
    return iter(io.StringIO(text, newline=""))


def _line_number(raw: bytes, index: int) -> int:
    return len((raw[:index] + b".").splitlines())


def _csv(path: Path, names: tuple[str, ...], encoding: str) -> Iterator[Record]:
    return _delimited(path, names, encoding, ",")


def _tsv(path: Path, names: tuple[str, ...], encoding: str) -> Iterator[Record]:
    return _delimited(path, names, encoding, "\t")


def _delimited(path: Path, names: tuple[str, ...], encoding: str, delimiter: str) -> Iterator[Record]:
    rows = _fields(path.name, _lines(path, encoding), delimiter)
    _, header = next(rows, ("", None))
    if header is None:
        raise UserError(f"{path.name}: the file is empty: expected a line of column names")
    _check_header(path.name, header, names)
    for place, fields in rows:
        if len(fields) != len(header):
            raise UserError(f"{place}: expected {len(header)} fields, found {len(fields)}")
        yield Record(place, dict(zip(header, fields, strict=True)))


def _fields(name: str, lines: Iterator[str], delimiter: str) -> Iterator[tuple[str, list[str]]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        place = f"{name}, line {reader.line_num + 1}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{place}: the row is not readable: {error}") from None
        if fields is None:
            return
        if fields:
            yield place, fields


def _json_lines(path: Path, names: tuple[str, ...], encoding: str) -> Iterator[Record]:
    for number, line in enumerate(_lines(path, encoding), start=1):
        if line.strip():
            place = f"{path.name}, line {number}"
            yield Record(place, _json_object(place, line))


def _json_object(place: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_no_key_twice, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not valid JSON: {error.msg} (character {error.pos + 1})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{place}: the row is {shown(value)}: expected a JSON object")
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    for name, _ in pairs if len(values) < len(pairs) else ():
        if sum(name == other for other, _ in pairs) > 1:
            raise ValueError(f"two values for {shown(name)}")
    return values


def _not_finite(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _parquet(path: Path, names: tuple[str, ...], encoding: str) -> Iterator[Record]:
    import pyarrow
    from datasets.exceptions import DatasetsError

    number = 0
    try:
        for table in _arrow_tables(path, names):
            for scalars in zip(*(table[name] for name in names), strict=True):
                number += 1
                place = f"{path.name}, row {number}"
                pairs = zip(names, scalars, strict=True)
                yield Record(place, {name: _python(place, name, scalar) for name, scalar in pairs})
    # A time zone that nobody knows is a KeyError, a type that `datasets` cannot cast a TypeError.
    except (pyarrow.ArrowException, DatasetsError, ValueError, KeyError, TypeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{path.name}: not readable as Parquet: {' '.join(str(error).split())}") from None


def _arrow_tables(path: Path, names: tuple[str, ...]) -> Iterator[Any]:
    """Yield Arrow tables of the columns named alone, `BATCH_ROWS` rows each."""
    import pyarrow
    from datasets import Features, load_dataset
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        schema = file.schema_arrow
        _check_header(path.name, schema.names, names)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        _check_size(path, sum(group.total_byte_size for group in groups))
    columns, unpacked = list(dict.fromkeys(names)), 0
    with tempfile.TemporaryDirectory() as cache:
        rows = load_dataset(
            "parquet",
            data_files=glob.escape(str(path.absolute())),  # the name of one file, not a pattern
            split="train",
            streaming=True,  # without a copy of the file
            columns=columns,
            features=Features.from_arrow_schema(pyarrow.schema([schema.field(name) for name in columns])),
            batch_size=BATCH_ROWS,
            cache_dir=cache,
        )
        for table in rows.with_format("arrow").iter(batch_size=BATCH_ROWS):
            unpacked += table.nbytes
            _check_size(path, unpacked)
            yield table


def _check_size(path: Path, unpacked: int) -> None:
    if unpacked > max(UNPACKED_BYTES, 100 * path.stat().st_size):
        raise UserError(f"{path.name}: unpacks to more than 100 times its size")


def _python(place: str, name: str, scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, KeyError) as error:
        raise UserError(f"{place}: column {name!r} is not readable: {error}") from None
