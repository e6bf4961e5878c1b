from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.fixture
def certificate(tmp_path):
    """(certificate, key) of 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    made, key = tmp_path / "own.pem", tmp_path / "own.key"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=penstock"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(made), "-keyout", str(key)]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    return made, key
