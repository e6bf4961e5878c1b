"""The ledger and its caps, worked by hand."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.burst.deciding.ledger import Caps, CloudBudgets, Entry, Used

NOV = datetime(2026, 11, 3, tzinfo=UTC).timestamp()
DEC = datetime(2026, 12, 1, 0, 0, 1, tzinfo=UTC).timestamp()


def used(entries, now_s, **settings):
    lines = Used(entries).lines(CloudBudgets(**settings), now_s, {"vision", "text"})
    return {(line.account, line.period): (line.limit_usd, line.used_usd) for line in lines}


def test_what_runs_counts_as_committed_and_what_is_over_as_spent():
    entries = [
        Entry("1.1", "committed", 10, "vision", NOV),
        Entry("2.1", "committed", 8, "text", NOV),
        Entry("1.1", "spent", 4, "vision", NOV + 60),
    ]
    found = used(
        entries,
        NOV + 90,
        site=Caps(usd_per_month=100, usd_total=500),
        per_account=Caps(usd_per_month=20),
        accounts={"text": Caps(usd_total=9)},
    )
    assert found == {
        ("", "month"): (100, 12),
        ("", "total"): (500, 12),
        ("vision", "month"): (20, 4),
        ("text", "total"): (9, 8),
    }


def test_a_run_counts_in_the_month_in_which_it_was_ordered():
    entries = [Entry("1.1", "committed", 10, "vision", NOV), Entry("1.1", "spent", 7, "vision", DEC)]
    site = Caps(usd_per_month=100, usd_total=100)
    assert used(entries, DEC, site=site) == {("", "month"): (100, 0), ("", "total"): (100, 7)}


def test_without_a_cap_nothing_may_be_spent():
    (line,) = Used().lines(CloudBudgets(), NOV, {"vision"})
    assert (line.left_usd, line.account) == (0, "")


@given(st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.floats(0, 50), st.booleans()), max_size=20))
def test_the_site_uses_what_its_accounts_use(runs):
    entries = []
    for number, (account, usd, over) in enumerate(runs):
        entries.append(Entry(str(number), "committed", usd, account, NOV))
        if over:
            entries.append(Entry(str(number), "spent", usd / 2, account, NOV))
    settings = CloudBudgets(site=Caps(usd_total=1e6), per_account=Caps(usd_total=1e6))
    lines = {line.account: line.used_usd for line in Used(entries).lines(settings, NOV, {"a", "b"})}
    nobody = sum(usd / 2 if over else usd for account, usd, over in runs if not account)
    assert abs(lines[""] - lines["a"] - lines["b"] - nobody) < 1e-6
