"""The base of the executor neither needs PyTorch nor imports it."""

from .spool import job_environment, process


def said(code: str) -> str:
    with process("-c", code, environment=job_environment(None)) as child:
        out, error = child.communicate(timeout=120)
    assert child.returncode == 0, error
    return out


def test_clients_checkpoints_and_commands_do_not_import_it():
    code = "import sys, penstock_executor, penstock_executor.report_command, penstock_executor.emulated; "
    assert said(code + "print(sorted({'torch', 'transformers', 'lightning'} & sys.modules.keys()))") == "[]\n"


def test_without_pytorch_start_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import penstock_executor as px\n"
        "try: px.start()\n"
        "except ImportError as error: print(error)"
    )
    assert said(code) == "penstock_executor.start needs PyTorch: pip install torch\n"
