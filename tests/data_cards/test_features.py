"""The features written into a card are those `datasets` itself would write."""

from __future__ import annotations

import datasets
import pyarrow as pa
import pytest

from headwater.core.errors import ConfigError
from headwater.data_cards.features import features_of, type_label

TURN = pa.struct([("role", pa.string()), ("content", pa.string())])


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.bool_(),
        pa.int8(),
        pa.int64(),
        pa.uint32(),
        pa.float16(),
        pa.float32(),
        pa.float64(),
        pa.binary(),
        pa.date32(),
        pa.timestamp("us"),
        pa.timestamp("ms", tz="UTC"),
        pa.list_(pa.string()),
        pa.large_list(pa.int32()),
        pa.list_(pa.float32(), 4),
        pa.list_(TURN),
        pa.list_(pa.list_(TURN)),
        pa.list_(pa.list_(pa.int32(), 3)),
        pa.struct([("a", pa.int32()), ("b", pa.list_(TURN))]),
        pa.list_(pa.struct([("t", pa.list_(pa.struct([("x", pa.string())])))])),
    ],
    ids=str,
)
def test_a_type_is_written_as_datasets_writes_it(kind: pa.DataType) -> None:
    schema = pa.schema([("column", kind)])
    assert features_of(schema) == datasets.Features.from_arrow_schema(schema)._to_yaml_list()


def test_free_form_json_is_written_as_datasets_writes_it() -> None:
    features = datasets.Features({"arguments": datasets.Json()})
    assert features_of(features.arrow_schema) == features._to_yaml_list()


@pytest.mark.parametrize("kind", [pa.null(), pa.map_(pa.string(), pa.int32()), pa.list_(pa.null())], ids=str)
def test_a_type_that_no_dataset_can_declare_is_refused_with_its_column(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="column"):
        features_of(pa.schema([("column", kind)]))


def test_a_type_reads_as_a_person_would_say_it() -> None:
    assert type_label(pa.list_(TURN)) == "list of {role, content}"
    assert type_label(pa.list_(pa.list_(pa.float32()))) == "list of list of float32"
