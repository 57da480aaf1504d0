"""docs/differences.md is what its generator writes."""

from tests.differential.documented import PAGE, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page()
