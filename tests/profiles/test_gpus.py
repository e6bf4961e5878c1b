import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_profiles.catalogue import CatalogueError
from penstock_profiles.families import load_families
from penstock_profiles.gpus import UnknownGpuError, load_gpus

GPUS = load_gpus()

ONE = """
[rtx5090]
vendor = "nvidia"
architecture = "blackwell"
memory_gb = 32
products = ["NVIDIA GeForce RTX 5090"]
aliases = ["5090"]
source = "the box that it came in"
"""


def site_file(tmp_path, text):
    path = tmp_path / "site.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("gpu_type", sorted(GPUS))
def test_each_gpu_names_its_source_and_is_found_by_every_name(gpu_type):
    gpu = GPUS[gpu_type]
    assert re.fullmatch(r"(NVIDIA|AMD), .+, 20\d\d", gpu.source)
    assert gpu.products
    for name in (gpu_type, *gpu.products, *gpu.aliases):
        assert GPUS.type_of(name) == gpu_type


@pytest.mark.parametrize(
    ("name", "gpu_type"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("A100-SXM4-40GB", "a100"),  # before driver 465
        ("nvidia_a100-sxm4-80gb", "a100_80gb"),  # Slurm's AutoDetect
        ("NVIDIA A100 80GB PCIe", "a100_80gb"),
        ("GeForce RTX 2080 Ti", "rtx2080ti"),
        ("rtx", "rtx2080ti"),
        ("Tesla T4", "t4"),
        ("tesla_v100-sxm2-32gb", "v100_32gb"),
        ("Quadro RTX 6000", "rtx6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX A6000", "rtxa6000"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("AMD Instinct MI300X OAM", "mi300x"),
    ],
)
def test_names_that_drivers_and_sites_use(name, gpu_type):
    assert GPUS.type_of(name) == gpu_type


@given(st.sampled_from([product for gpu in GPUS.values() for product in gpu.products]), st.booleans(), st.booleans())
def test_case_and_spaces_do_not_matter(product, upper, underscores):
    name = product.upper() if upper else product.lower()
    assert GPUS.type_of(name.replace(" ", "_") if underscores else f" {name} ") == GPUS.type_of(product)


def test_the_families_run_on_known_gpus():
    assert {GPUS.type_of(name) for family in load_families().values() for name in family.gpus} <= set(GPUS)


def test_unknown_gpu_lists_the_known_ones_and_the_closest():
    with pytest.raises(UnknownGpuError, match=r"unknown GPU 'H10O'; known are a10, .*v100_32gb; did you mean h100"):
        GPUS.type_of("H10O")
    with pytest.raises(UnknownGpuError, match=r"unknown GPU 'abacus'; known are a10, .*v100_32gb$"):
        GPUS.type_of("abacus")
    with pytest.raises(UnknownGpuError, match=r"unknown GPU type 'l40z'; known are .*; did you mean l40 or l40s"):
        GPUS["l40z"]


def test_a_site_adds_a_type(tmp_path):
    both = load_gpus(site_file(tmp_path, ONE))
    assert both["rtx5090"].memory_gb == 32
    assert both.type_of("GeForce RTX 5090") == both.type_of("5090") == "rtx5090"
    assert both["t4"] == GPUS["t4"]


def test_a_sites_a100_may_be_the_larger(tmp_path):
    """The site's names have priority over Penstock's, and a replaced entry keeps none of its names."""
    larger = ONE.replace("rtx5090", "a100").replace("memory_gb = 32", "memory_gb = 80")
    larger = larger.replace("GeForce RTX 5090", "A100-SXM4-80GB").replace("5090", "big")
    both = load_gpus(site_file(tmp_path, larger))
    assert both["a100"].memory_gb == 80
    assert both.type_of("NVIDIA A100-SXM4-80GB") == "a100"
    assert both.type_of("NVIDIA A100 80GB PCIe") == "a100_80gb"
    with pytest.raises(UnknownGpuError, match="did you mean"):
        both.type_of("NVIDIA A100-SXM4-40GB")


def test_one_name_for_two_types(tmp_path):
    twice = ONE + ONE.replace("[rtx5090]", "[other]")
    with pytest.raises(CatalogueError, match=r"site\.toml: '5090' names both rtx5090 and other; take it out"):
        load_gpus(site_file(tmp_path, twice))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_gb = 32", "memory_gp = 32", r"rtx5090\.memory_g"),
        ("memory_gb = 32", "memory_gb = 32\nwatts = 3", r"rtx5090\.watts=3.*known here are vendor, architecture, "),
        ("memory_gb = 32", "memory_gb = 0", r"rtx5090\.memory_gb=0"),
        ("memory_gb = 32", "memory_gb = nan", r"rtx5090\.memory_gb=nan"),
        (
            '"nvidia"',
            '"nvidea"',
            r"rtx5090\.vendor='nvidea'.*'nvidia', 'amd' or 'intel'.*top of Penstock's own gpus\.toml",
        ),
        ('["5090"]', '"5090"', r"rtx5090\.aliases='5090'"),
        ('["5090"]', "[5090]", r"rtx5090\.aliases\.0=5090"),
        ('source = "the box that it came in"', "", r"rtx5090\.source: Field required"),
        ("[rtx5090]", "[rtx5090", "cannot be read"),
    ],
)
def test_a_typo_names_file_field_and_value(tmp_path, old, new, words):
    assert old in ONE
    with pytest.raises(CatalogueError, match=rf"(?s)site\.toml.*{words}"):
        load_gpus(site_file(tmp_path, ONE.replace(old, new, 1)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CatalogueError, match=r"nowhere\.toml cannot be read"):
        load_gpus(tmp_path / "nowhere.toml")
