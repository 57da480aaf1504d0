"""Pages that are generated from lists are what their generators write."""

import pytest

from tests.conformance import documented as conformance
from tests.lab.fuzz import documented as differential


@pytest.mark.parametrize("generator", [differential, conformance], ids=["differences", "conformance"])
def test_the_page_is_up_to_date(generator):
    assert generator.PAGE.read_text() == generator.page()
