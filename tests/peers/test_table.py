"""docs/peers.md is made from the committed table."""

from tests.peers import table, wheels


def test_docs_are_the_committed_table() -> None:
    assert (wheels.REPOSITORY / "docs" / "peers.md").read_text() == table.render()
