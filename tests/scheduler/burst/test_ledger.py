"""The ledger and its caps, worked by hand."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_scheduler.burst.deciding.ledger import Caps, CloudBudgets, Entry, Used, by_month, month

NOV = datetime(2026, 11, 3, tzinfo=UTC).timestamp()
DEC = datetime(2026, 12, 1, 0, 0, 1, tzinfo=UTC).timestamp()


def used(entries, now_s, open_usd=(), *, later=False, **settings):
    """(account, period) -> cap and dollars used, of the present period, or of the later one."""
    lines = Used(entries).lines(CloudBudgets(**settings), now_s, {"vision", "text"}, dict(open_usd))
    return {
        (line.account, line.period): (line.limit_usd, line.used_usd) for line in lines if (line.from_h > 0) == later
    }


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


def test_a_commitment_counts_from_the_next_month_on_with_what_is_left_of_it():
    entries = [Entry("1.1", "committed", 10, "vision", NOV), Entry("2.1", "committed", 8, "text", NOV)]
    site = Caps(usd_per_month=100, usd_total=100)
    assert used(entries, NOV, site=site) == {("", "month"): (100, 18), ("", "total"): (100, 18)}
    found = used(entries, DEC, {"1.1": (3.0, 0.0)}, site=site)
    assert found == {("", "month"): (100, 3), ("", "total"): (100, 18)}, "the run 2.1 is closed without a bill"


def test_a_commitment_is_split_at_the_end_of_the_month():
    entries = [Entry("1.1", "committed", 10, "vision", NOV), Entry("2.1", "committed", 8, "text", NOV)]
    caps = {"site": Caps(usd_per_month=100, usd_total=100), "per_account": Caps(usd_per_month=50)}
    parts = {"1.1": (4.0, 6.5), "2.1": (8.0, 20.0)}
    assert used(entries, NOV, parts, **caps) == {
        ("", "month"): (100, 12),
        ("", "total"): (100, 18),
        ("text", "month"): (50, 8),
        ("vision", "month"): (50, 4),
    }
    assert used(entries, NOV, parts, later=True, **caps) == {
        ("", "month"): (100, 14.5),
        ("text", "month"): (50, 8),
        ("vision", "month"): (50, 6.5),
    }


def test_an_order_needs_of_each_month_what_may_fall_into_it():
    """10 hours of $1 and 50 cents of data, 4 hours before the end of the month: instances come within ten minutes."""
    now_s = month(NOV)[1] - 4 * 3600
    this, then = Used().lines(CloudBudgets(site=Caps(usd_per_month=100)), now_s, (), {})
    assert this.needs_usd(10.5, 1.0, 0.5) == pytest.approx(4.5)
    assert then.needs_usd(10.5, 1.0, 0.5) == pytest.approx(6.5 + 1 / 6)
    assert (this.needs_usd(3.0, 1.0), then.needs_usd(3.0, 1.0)) == (3.0, 0.0)
    assert "$100.00 next month" in str(then)


def test_dollars_count_in_the_month_in_which_they_were_spent():
    border = month(NOV)[1]
    entries = [
        Entry("1.1", "committed", 10, "vision", NOV),
        Entry("1.1", "spent", 4, "vision", border + 5),
        Entry("1.1", "spent", 3, "vision", border - 1),
    ]
    site = Caps(usd_per_month=100, usd_total=100)
    assert used(entries, DEC, site=site) == {("", "month"): (100, 4), ("", "total"): (100, 7)}
    assert used(entries, NOV, site=site) == {("", "month"): (100, 3), ("", "total"): (100, 7)}


@pytest.mark.parametrize(
    ("begin", "end", "parts"),
    [
        ((2026, 11, 3), (2026, 11, 4), {(2026, 11): 1.0}),
        ((2026, 11, 3), (2026, 12, 1), {(2026, 11): 1.0}),
        ((2026, 11, 30), (2026, 12, 4), {(2026, 11): 0.25, (2026, 12): 0.75}),
        ((2026, 12, 1), (2027, 3, 1), {(2026, 12): 31 / 90, (2027, 1): 31 / 90, (2027, 2): 28 / 90}),
        ((2026, 11, 3), (2026, 11, 3), {(2026, 11): 1.0}),
    ],
)
def test_an_amount_is_split_at_each_border_of_a_month(begin, end, parts):
    found = by_month(datetime(*begin, tzinfo=UTC).timestamp(), datetime(*end, tzinfo=UTC).timestamp(), 1.0)
    expected = {datetime(*first, 1, tzinfo=UTC).timestamp(): part for first, part in parts.items()}
    assert found == pytest.approx(expected)


def test_without_a_cap_nothing_may_be_spent():
    (line,) = Used().lines(CloudBudgets(), NOV, {"vision"}, {})
    assert (line.left_usd, line.account) == (0, "")


@given(st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.floats(0, 50), st.booleans()), max_size=20))
def test_the_site_uses_what_its_accounts_use(runs):
    entries = []
    for number, (account, usd, over) in enumerate(runs):
        entries.append(Entry(str(number), "committed", usd, account, NOV))
        if over:
            entries.append(Entry(str(number), "spent", usd / 2, account, NOV))
    settings = CloudBudgets(site=Caps(usd_total=1e6), per_account=Caps(usd_total=1e6))
    lines = {line.account: line.used_usd for line in Used(entries).lines(settings, NOV, {"a", "b"}, {})}
    nobody = sum(usd / 2 if over else usd for account, usd, over in runs if not account)
    assert abs(lines[""] - lines["a"] - lines["b"] - nobody) < 1e-6
