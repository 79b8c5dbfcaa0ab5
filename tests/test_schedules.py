"""Tuned choices are found again, doubtful ones are not used, and a
silent book asks the cost model.
"""

import pytest
from programs import CPU, target_graph

from codegen.backend_cpp import CppBackend
from codegen.lower import lower
from codegen.schedules import BadScheduleBook, ScheduleBook, region_digest, region_text
from ir.graph import DECODE, GraphKey, Mode
from ir.passes.manager import run_pipeline


def regions(key=DECODE):
    graph = run_pipeline(target_graph(key), CPU)
    return [lower(graph, number) for number in graph.regions()]


@pytest.fixture(scope="module")
def products():
    return [low for low in regions() if "linear" in low.label]


def choices(low):
    backend = CppBackend()
    return backend, sorted(backend.schedules(low), key=lambda s: backend.cost(low, s))


def test_layers_repeat_regions_and_rows_tell_them_apart(products):
    one = [region_digest(low) for low in regions()]
    assert len(set(one)) < len(one)
    two = {region_digest(low) for low in regions(GraphKey(Mode.VERIFY, 2))}
    assert not two & set(one)
    assert not any("layers" in region_text(low) for low in products)


def test_a_silent_book_leaves_it_to_the_cost_model(products):
    backend, space = choices(products[0])
    chosen = ScheduleBook().choose(products[0], backend)
    assert backend.cost(products[0], chosen) == backend.cost(products[0], space[0])


def test_a_tuned_choice_is_kept_on_disk(products, tmp_path):
    backend, space = choices(products[0])
    book = ScheduleBook()
    book.put(products[0], backend, space[-1])
    book.save(tmp_path / "book.json")
    assert ScheduleBook.load(tmp_path / "book.json") == book
    again = ScheduleBook.load(tmp_path / "book.json")
    assert again.choose(products[0], backend) == space[-1] != space[0]
    other = next(low for low in products if region_digest(low) != region_digest(products[0]))
    assert again.choose(other, backend) == ScheduleBook().choose(other, backend)


def test_a_choice_outside_the_space_is_not_used(products):
    backend, space = choices(products[0])
    book = ScheduleBook()
    book.put(products[0], backend, space[-1])
    (key,) = book.entries
    book.entries[key] = {**book.entries[key], "rows": 99}
    assert book.choose(products[0], backend) == ScheduleBook().choose(products[0], backend)


def test_a_choice_of_another_device_is_not_used(products):
    backend, space = choices(products[0])
    book = ScheduleBook()
    book.put(products[0], CppBackend(extensions="plain"), space[-1])
    assert book.choose(products[0], backend) == ScheduleBook().choose(products[0], backend)


@pytest.mark.parametrize("text", ["", "[]", '{"entries": [{"region": 1}]}', '{"entries": 5}'])
def test_a_book_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "book.json"
    path.write_text(text)
    with pytest.raises(BadScheduleBook, match=r"book.json is not a schedule book"):
        ScheduleBook.load(path)
    assert ScheduleBook.load(tmp_path / "absent.json") == ScheduleBook()
