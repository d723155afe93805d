"""Rules of options: the sentence of one that is broken."""

import pytest

from levanter_diloco.errors import OptionError
from levanter_diloco.options.rules import require, require_one_of


def test_broken_rule_names_path_value_rule_and_what_works() -> None:
    require(True, "drop_rate", 2, "lie in [0, 1]", 0.1)
    with pytest.raises(OptionError, match=r"^trainer\.diloco\.drop_rate \(2\) must lie in \[0, 1\]; 0\.1 works\.$"):
        require(False, "drop_rate", 2, "lie in [0, 1]", 0.1)


def test_choice_is_answered_with_the_choices() -> None:
    require_one_of(("layers", "balanced"), "partition", "balanced")
    with pytest.raises(OptionError, match=r"partition \(rows\) must be one of layers, balanced; layers works\."):
        require_one_of(("layers", "balanced"), "partition", "rows")
