import subprocess
import sys
import tomllib

import numpy as np
import pytest
from pydantic import TypeAdapter

from penstock_profiles import families
from penstock_profiles.catalogue import CatalogueError
from penstock_profiles.estimators import AnyEstimator
from penstock_profiles.families import UnknownFamilyError, load_families
from penstock_profiles.gpus import load_gpus

FAMILIES = load_families()

ONE = """
[mine]
about = "a model of ours"
source = "measured here"
initial_batch = 32
max_batch = 256
grad_sqr = 1.0
grad_var = 8.0
restart_cost_s = 20

[mine.gpus.l4]
max_atomic_batch = 64
step = { alpha_c = 0.1, beta_c = 0.01, alpha_r = 0.1, beta_r = 0.0, alpha_n = 0.3, beta_n = 0.0, gamma = 1.5 }
"""


def site_file(tmp_path, text):
    path = tmp_path / "site.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_family_is_complete_and_plausible(name):
    family = FAMILIES[name]
    assert "our own fit" in family.source
    assert set(family.gpus) >= {"t4", "rtx", "a100"}
    assert all(gpu.median_rel_err is not None and gpu.median_rel_err < 0.3 for gpu in family.gpus.values())
    estimator = family.estimator()
    one, two = np.array(1), np.array(2)
    for gpu_type in family.gpus:
        assert estimator.goodput(gpu_type, one, one) > 0
        # Two GPUs beat one, but do not more than double it.
        if name != "ncf":
            gain = estimator.goodput(gpu_type, one, two) / estimator.goodput(gpu_type, one, one)
            assert 1 < gain < 2.1
    adapter = TypeAdapter(AnyEstimator)
    assert adapter.validate_json(adapter.dump_json(estimator)) == estimator


def test_families_of_the_demo_are_there():
    wanted = {"resnet18-cifar10", "resnet50-imagenet", "bert-squad", "deepspeech2", "yolov3", "ncf"}
    assert wanted <= set(FAMILIES)


def test_a100_is_fastest_for_bert():
    estimator = FAMILIES["bert-squad"].estimator()
    t4, rtx, a100 = (float(estimator.goodput(t, np.array(1), np.array(1))) for t in ("t4", "rtx", "a100"))
    assert t4 < rtx < a100


def test_another_initial_batch_keeps_the_noise_per_sample():
    """Variance halves when the batch doubles: 8 at 32 samples is 4 at 64."""
    family = families.Family.model_validate(tomllib.loads(ONE)["mine"])
    estimator = family.estimator(batch_size=64)
    assert (estimator.initial_batch, estimator.grad_var, estimator.max_batch) == (64, 4.0, 256)
    assert family.estimator(batch_size=512).max_batch == 512
    assert family.estimator(max_batch_size=100, fixed_batch=True).fixed_batch


def test_bad_batch_sizes_are_refused():
    with pytest.raises(ValueError, match="batch_size=0"):
        FAMILIES["ncf"].estimator(batch_size=0)
    with pytest.raises(ValueError, match="max_batch=10 is below initial_batch=32"):
        FAMILIES["ncf"].estimator(batch_size=32, max_batch_size=10)


def test_unknown_family_lists_the_known_ones():
    with pytest.raises(UnknownFamilyError, match=r"unknown model family 'resnet-50'; known are bert-squad, .*yolov3"):
        FAMILIES["resnet-50"]


def test_a_site_adds_and_replaces(tmp_path):
    path = site_file(tmp_path, ONE + ONE.replace("mine", "ncf"))
    both = load_families(path)
    assert both["mine"].restart_cost_s == 20
    assert set(both["ncf"].gpus) == {"l4"}
    assert both["bert-squad"] == FAMILIES["bert-squad"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_batch = 256", "max_bacth = 256", r"mine\.max_batch"),
        ("[mine]", "[mine]\ncolour = 3", r"mine\.colour=3.*known here are about, source"),
        ("grad_var = 8.0", "grad_var = nan", r"mine\.grad_var=nan"),
        ("grad_sqr = 1.0", 'grad_sqr = "one"', r"mine\.grad_sqr='one'"),
        ("initial_batch = 32", "initial_batch = 0", r"mine\.initial_batch=0"),
        ("initial_batch = 32", "initial_batch = 300", r"max_batch=256 is below initial_batch=300"),
        ("max_atomic_batch = 64", "max_atomic_batch = -1", r"mine\.gpus\.l4\.max_atomic_batch=-1"),
        (
            "max_atomic_batch = 64",
            "max_atomic_batch = 64\nmemory = 2",
            r"l4\.memory=2.*known here are max_atomic_batch",
        ),
        ("alpha_c = 0.1", "alpha_c = -0.1", r"mine\.gpus\.l4\.step: .*alpha_c=-0.1"),
        ("gamma = 1.5", "gamma = 1.5, delta = 7", r"step\.delta=7.*known here are alpha_c"),
        ("[mine.gpus.l4]", "[mine.gpus.l4", "cannot be read"),
    ],
)
def test_a_typo_names_file_field_and_value(tmp_path, old, new, words):
    assert old in ONE
    with pytest.raises(CatalogueError, match=rf"(?s)site\.toml.*{words}"):
        load_families(site_file(tmp_path, ONE.replace(old, new, 1)))


def test_a_family_that_is_no_table(tmp_path):
    with pytest.raises(CatalogueError, match=r"site\.toml: mine=3"):
        load_families(site_file(tmp_path, "mine = 3"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CatalogueError, match=r"nowhere\.toml cannot be read"):
        load_families(tmp_path / "nowhere.toml")


def test_import_needs_nothing_heavy():
    """Training jobs import the package: it needs numpy and pydantic, but neither scipy nor other packages of Penstock."""
    code = (
        "import sys; import penstock_profiles.families; "
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'scipy', 'pandas', 'torch', 'penstock_scheduler'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == ""


def test_a_family_goes_by_the_names_that_a_site_has_for_its_gpus():
    """The catalogue says rtx; this site rtx2080ti, has no t4, and has an unknown GPU."""
    here = FAMILIES.on(["rtx2080ti", "a100", "abacus"], load_gpus())
    assert set(here["yolov3"].gpus) == {"rtx2080ti", "a100"}
    assert here["yolov3"].gpus["rtx2080ti"] == FAMILIES["yolov3"].gpus["rtx"]
    with pytest.raises(UnknownFamilyError):
        here["yolov9"]


def test_a_familys_entry_under_the_sites_own_name_has_priority(tmp_path):
    table = ONE[ONE.index("[mine.gpus") :]
    families = load_families(
        site_file(tmp_path, ONE.replace("l4", "t4") + table.replace("l4", "tesla_t4").replace("64", "8"))
    )
    here = families.on(["t4", "tesla_t4"], load_gpus())["mine"].gpus
    assert {name: gpu.max_atomic_batch for name, gpu in here.items()} == {"t4": 64, "tesla_t4": 8}
