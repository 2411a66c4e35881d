"""Owns the list of mistakes that people make by hand, each with what it must be answered: the place and the way out.

Knows nothing of how they are found. Calls and broken artifacts are in `tests/tvm/artifact/test_wrong_calls.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from support.spaces import FAKES

BASE = {
    **FAKES,
    "workloads.toml": """\
edition = 1

[artifact]
name = "mine"
version = "1.0"

[target.host]
arch = "host"

[target.h200]
arch = "h200"

[defaults]
targets = ["host"]

[[workload]]
name = "projection"
rule = "matmul"
m = [16, 128]
n = 256
k = 256
layout = "nt"
dtype = "float32"
epilogue = ["bias", "relu"]
top_k = 8

[[workload]]
name = "conv"
rule = "conv2d"
n = 1
h = 14
w = 14
c = 64
f = 64
kh = 3
kw = 3
padding = 1
dtype = "float32"

[[workload]]
name = "norm"
rule = "softmax"
shape = [16, 64]
""",
}


RULE_FILE = BASE["rules/scale.py"]
RULE_ENTRY = BASE["workloads.toml"].replace('rule = "softmax"\nshape = [16, 64]', 'rule = "scale"\nn = 8')
POLICY_ENTRY = BASE["workloads.toml"].replace("top_k = 8", 'policy = "plain"')
ARCH_TARGET = BASE["workloads.toml"].replace('arch = "h200"', 'arch = "test-cpu"')


class Mistake(NamedTuple):
    """A mistake in a workspace that is otherwise right."""

    what: str
    old: str
    """Text that `new` stands in place of; empty: `new` is added at the end."""
    new: str
    place: str
    """What the answer begins with, behind `error: `."""
    way_out: str
    """What the same line holds: what was expected, or what to do."""


LINE = "workloads.toml:{}: "
ENTRY = "workloads.toml:{}: {}: "

SOFTMAX = 'rule = "softmax"\nshape = [16, 64]\n'
APPEND = 'rule = "rotary_append"\nbatch = 2\nheads = 4\nsize = 64\nkeys = 128\n'
FP4 = 'rule = "matmul_quantized"\nm = 16\nn = 128\nk = 256\nweights = "float4_e2m1fn"\n'
GROUPED = 'rule = "matmul_grouped"\ngroups = 4\nrows = 64\nn = 64\nk = 64\n'
ATTENTION = 'rule = "attention"\nbatch = 1\nheads = 4\nqueries = 64\nhead_dim = 64\n'
EXPRESSION = 'rule = "expression"\nexpr = "x + y"\nshapes = [[4], [4]]\n'

DECLARATIONS = (
    Mistake("an empty file", BASE["workloads.toml"], "", "workloads.toml: ", "`kerneldecl init` writes an example"),
    Mistake("an open string", 'name = "mine"', 'name = "mine', LINE.format(4), "end the string with a quote"),
    Mistake("no quotes", 'name = "mine"', "name = mine", LINE.format(4), "strings stand in quotes"),
    Mistake("True as in Python", "top_k = 8", "causal = True", LINE.format(25), "truth values are true and false"),
    Mistake("an open list", "m = [16, 128]", "m = [16, 128", LINE.format(20), "not TOML"),
    Mistake("a colon", "n = 256", "n: 256", LINE.format(20), "write KEY = VALUE"),
    Mistake("a key twice", "n = 256", "n = 256\nn = 512", LINE.format(21), "remove one of them"),
    Mistake("a table twice", "[defaults]", "[artifact]\n\n[defaults]", LINE.format(13), "a table stands once"),
    Mistake(
        "one bracket", '[[workload]]\nname = "norm"', '[workload]\nname = "norm"', LINE.format(40), "write [[workload]], in two brackets"
    ),
    Mistake("no edition", "edition = 1\n", "", "workloads.toml: ", "write edition = 1 as the first line"),
    Mistake("an edition to come", "edition = 1", "edition = 2", LINE.format(1), "write edition = 1"),
    Mistake("an edition in quotes", "edition = 1", 'edition = "1"', LINE.format(1), "write edition = 1"),
    Mistake("no version", 'version = "1.0"\n', "", "workloads.toml:3: [artifact]: ", "expected a version"),
    Mistake("a version as a number", 'version = "1.0"', "version = 1.0", LINE.format(5), 'write "1.0"'),
    Mistake("a name with a space", 'name = "mine"', 'name = "my kernels"', LINE.format(4), "expected a name of at most 100 letters"),
    Mistake("an arch misspelt", 'arch = "h200"', 'arch = "h20"', LINE.format(11), 'did you mean "h200"?'),
    Mistake("an arch in capitals", 'arch = "h200"', 'arch = "H200"', LINE.format(11), 'did you mean "h200"?'),
    Mistake("no arch", '[target.h200]\narch = "h200"', "[target.h200]", LINE.format(10), "expected a name"),
    Mistake("a target misspelt", 'targets = ["host"]', 'targets = ["hots"]', LINE.format(14), 'did you mean "host"?'),
    Mistake("a target without a list", 'targets = ["host"]', 'targets = "host"', LINE.format(14), 'write ["host"]'),
    Mistake("workloads", '[[workload]]\nname = "norm"', '[[workloads]]\nname = "norm"', LINE.format(40), 'did you mean "workload"?'),
    Mistake("a table misspelt", "[defaults]", "[default]\n\n[defaults]", LINE.format(13), 'did you mean "defaults"?'),
    Mistake("no name", 'name = "norm"\n', "", LINE.format(40), "expected a name"),
    Mistake("a name twice", 'name = "norm"', 'name = "conv"', LINE.format(41), "first declared in line 27"),
    Mistake("no rule", 'rule = "softmax"\n', "", ENTRY.format(40, "norm"), "expected a name"),
    Mistake("a rule misspelt", 'rule = "softmax"', 'rule = "sofmax"', ENTRY.format(42, "norm"), 'did you mean "softmax"?'),
    Mistake("a rule's class", 'rule = "matmul"', 'rule = "MatMul"', ENTRY.format(18, "projection"), 'did you mean "matmul"?'),
    Mistake("torch's name of a rule", 'rule = "matmul"', 'rule = "linear"', ENTRY.format(18, "projection"), "rule matmul computes it"),
    Mistake("BLAS's name of a rule", 'rule = "matmul"', 'rule = "gemm"', ENTRY.format(18, "projection"), "rule matmul computes it"),
    Mistake("a rule that is not there", 'rule = "softmax"', 'rule = "fft"', ENTRY.format(42, "norm"), "`kerneldecl new rule fft`"),
    Mistake("an attribute misspelt", 'layout = "nt"', 'layuot = "nt"', ENTRY.format(22, "projection"), 'did you mean "layout"?'),
    Mistake("cuBLAS's attribute", 'layout = "nt"', "transpose_b = true", ENTRY.format(22, "projection"), "expected one of m, n, k"),
    Mistake("a setting misspelt", "top_k = 8", "topk = 8", ENTRY.format(25, "projection"), 'did you mean "top_k"?'),
    Mistake(
        "an attribute left out", "k = 256\n", "", ENTRY.format(16, "projection"), "k of rule matmul is missing; expected an integer above 0"
    ),
    Mistake("an extent of 0", "n = 256", "n = 0", ENTRY.format(20, "projection"), "expected an integer above 0"),
    Mistake("an extent below 0", "n = 256", "n = -1", ENTRY.format(20, "projection"), "expected an integer above 0"),
    Mistake("an extent with a point", "n = 256", "n = 256.0", ENTRY.format(20, "projection"), "write 256"),
    Mistake("an extent in quotes", "n = 256", 'n = "256"', ENTRY.format(20, "projection"), "write 256, without quotes"),
    Mistake("an extent among others", "m = [16, 128]", 'm = [16, "128"]', ENTRY.format(19, "projection"), "write 128, without quotes"),
    Mistake("no value to expand", "m = [16, 128]", "m = []", ENTRY.format(19, "projection"), "expected a value, or a list of values"),
    Mistake("a value twice", "m = [16, 128]", "m = [16, 16]", ENTRY.format(19, "projection"), "m lists these values twice"),
    Mistake("a layout that is none", 'layout = "nt"', 'layout = "NT"', ENTRY.format(22, "projection"), "expected one of nn, nt, tn, tt"),
    Mistake("a dtype in short", 'dtype = "float32"\nepi', 'dtype = "fp16"\nepi', ENTRY.format(23, "projection"), 'did you mean "float16"?'),
    Mistake("torch's half", 'dtype = "float32"\nepi', 'dtype = "half"\nepi', ENTRY.format(23, "projection"), 'did you mean "float16"?'),
    Mistake("a step misspelt", '["bias", "relu"]', '["bias", "rleu"]', ENTRY.format(24, "projection"), 'did you mean "relu"?'),
    Mistake("a step without a list", '["bias", "relu"]', '"bias"', ENTRY.format(24, "projection"), 'write ["bias"]'),
    Mistake("top_k of 0", "top_k = 8", "top_k = 0", ENTRY.format(25, "projection"), "expected an integer above 0"),
    Mistake("a tolerance of 2", "top_k = 8", "tolerance = 2", ENTRY.format(25, "projection"), "expected a number from 0 to 1"),
    Mistake("a tolerance in quotes", "top_k = 8", 'tolerance = "1e-3"', ENTRY.format(25, "projection"), "write 1e-3, without quotes"),
    Mistake("a tag without a list", "top_k = 8", 'tags = "fast"', ENTRY.format(25, "projection"), 'write ["fast"]'),
    Mistake(
        "a timing that is none", "top_k = 8", 'timing = "cold"', ENTRY.format(25, "projection"), "expected cool, steady, isolated or both"
    ),
    Mistake(
        "a dispatch that is none", "top_k = 8", 'dispatch = "cublas"', ENTRY.format(25, "projection"), "expected tuned, library or fastest"
    ),
    Mistake("a policy misspelt", "top_k = 8", 'policy = "atuo"', ENTRY.format(25, "projection"), 'did you mean "auto"?'),
    Mistake("a GPU's policy", "top_k = 8", 'policy = "wgmma_matmul"', ENTRY.format(25, "projection"), 'write "auto"'),
    Mistake(
        "an option misspelt",
        "top_k = 8",
        'policy = { name = "random", trails = 3 }',
        ENTRY.format(25, "projection"),
        'did you mean "trials"?',
    ),
    Mistake(
        "options of auto", "top_k = 8", 'policy = { name = "auto", trials = 3 }', ENTRY.format(25, "projection"), "takes no options; top_k"
    ),
    Mistake("a policy without a name", "top_k = 8", "policy = { trials = 3 }", ENTRY.format(25, "projection"), "expected a name"),
    Mistake("a budget as a number", "top_k = 8", "budget = 60", ENTRY.format(25, "projection"), "such as { trials = 200, seconds = 60"),
    Mistake("a budget below 0", "top_k = 8", "budget = { seconds = -1 }", ENTRY.format(25, "projection"), "expected a number above 0"),
    Mistake("a budget misspelt", "top_k = 8", "budget = { second = 1 }", ENTRY.format(25, "projection"), 'did you mean "seconds"?'),
    Mistake("a generation below 0", "top_k = 8", "generation = -1", ENTRY.format(25, "projection"), "expected an integer of at least 0"),
    Mistake(
        "a kernel that is not there", "top_k = 8", 'specialize = "mine.py"', ENTRY.format(25, "projection"), "no such file in the workspace"
    ),
    Mistake("a kernel in CUDA", "top_k = 8", 'specialize = "mine.cu"', ENTRY.format(25, "projection"), "expected the path of a .py file"),
    Mistake("a shape as a number", "shape = [16, 64]", "shape = 16", ENTRY.format(43, "norm"), "write [16]"),
    Mistake("a shape of 0", "shape = [16, 64]", "shape = [16, 0]", ENTRY.format(43, "norm"), "expected an integer above 0"),
    Mistake("shapes of two ranks", "shape = [16, 64]", "shape = [[128, 1000], [1000]]", ENTRY.format(43, "norm"), "in a table of its own"),
    Mistake("another library's attribute", "k = 256", "depth = 256", ENTRY.format(21, "projection"), 'did you mean "k"?'),
    Mistake("a bound misspelt", "m = [16, 128]", "m = { up_to = 64 }", ENTRY.format(19, "projection"), "expected { upto = 4096, tuned = ["),
    Mistake("a bound alone", "m = [16, 128]", "m = { upto = 64 }", ENTRY.format(19, "projection"), "expected { upto = 4096, tuned = ["),
    Mistake(
        "a bound among values",
        "m = [16, 128]",
        "m = [1, { upto = 64, tuned = [16] }]",
        ENTRY.format(19, "projection"),
        "write m = {upto = 64, tuned = [16]}",
    ),
    Mistake(
        "rows beyond the bound",
        "m = [16, 128]",
        "m = { upto = 64, tuned = [128] }",
        ENTRY.format(19, "projection"),
        "tuned of m has 128, which is above upto = 64",
    ),
    Mistake(
        "rows without a list",
        "m = [16, 128]",
        "m = { upto = 64, tuned = 16 }",
        ENTRY.format(19, "projection"),
        "expected a list of integers above 0",
    ),
    Mistake(
        "rows twice",
        "m = [16, 128]",
        "m = { upto = 64, tuned = [16, 16] }",
        ENTRY.format(19, "projection"),
        "expected different integers in ascending order",
    ),
    Mistake(
        "a bound of 1", "m = [16, 128]", "m = { upto = 1, tuned = [1] }", ENTRY.format(19, "projection"), "expected an integer above 1"
    ),
    *(
        Mistake(what, SOFTMAX, lines, ENTRY.format(line, "norm"), way_out)
        for what, lines, line, way_out in (
            ("heads without halves", APPEND.replace("size = 64", "size = 63"), 40, "size 63 has no halves"),
            ("pages that do not divide", f"{APPEND}page_size = 48\n", 40, "keys 128 is no multiple of page_size 48"),
            ("pages without a size", f"{APPEND}pages = 4\n", 40, "pages 4 is given without page_size"),
            ("pages too few", f"{APPEND}page_size = 32\npages = 1\n", 40, "write pages = 8 or more"),
            ("tokens beyond the cache", f"{APPEND}tokens = 256\n", 40, "over keys 128, the rows of a sequence's cache"),
            ("vLLM's layout", f'{APPEND}layout = "nhd"\n', 47, "expected one of bhsd, bshd"),
            ("another rule's attribute", APPEND.replace("size", "head_dim"), 45, 'did you mean "size"?'),
            ("4-bit floats without scales", FP4, 40, "need a scale_dtype; write float8_e8m0fnu (MXFP4) or float8_e4m3fn (NVFP4)"),
            ("MXFP4 as weights", FP4.replace("float4_e2m1fn", "mxfp4"), 46, 'did you mean "float4_e2m1fn"?'),
            ("MXFP4 in groups of 128", f'{FP4}scale_dtype = "float8_e8m0fnu"\n', 40, "MXFP4 has groups of 32, not group 128"),
            ("NVFP4 in groups of 32", f'{FP4}scale_dtype = "float8_e4m3fn"\ngroup = 32\n', 40, "NVFP4 has groups of 16, not group 32"),
            (
                "MXFP4 with one scale more",
                f'{FP4}scale_dtype = "float8_e8m0fnu"\ngroup = 32\ntensor_scale = true\n',
                40,
                "tensor_scale is for scale_dtype float8_e4m3fn",
            ),
            ("zero points of floats", f'{FP4}scale_dtype = "float8_e8m0fnu"\ngroup = 32\nzero_points = true\n', 40, "are for integers"),
            ("a short dtype of scales", f'{FP4}scale_dtype = "e8m0"\ngroup = 32\n', 47, 'did you mean "float8_e8m0fnu"?'),
            ("experts", GROUPED.replace("groups", "experts"), 43, 'did you mean "groups"?'),
            ("more rows in use than there are", f"{GROUPED}used = 100\n", 40, "used 100 is over the 64 rows that there are"),
            ("transposed groups", f'{GROUPED}layout = "tn"\n', 47, "expected one of nt, nn"),
            ("offsets that are arguments", f"{GROUPED}offsets = [16, 32]\n", 47, 'unknown attribute "offsets" of rule matmul_grouped'),
            ("attention's size", ATTENTION.replace("head_dim", "size"), 46, 'did you mean "head_dim"?'),
            ("heads that do not group", f"{ATTENTION}kv_heads = 3\n", 40, "kv_heads"),
            ("dropout", f"{ATTENTION}dropout = 0.1\n", 47, 'unknown attribute "dropout" of rule attention'),
            ("a truth value in quotes", f'{ATTENTION}causal = "yes"\n', 47, "expected true or false"),
            ("a scale in words", f'{ATTENTION}scale = "sqrt"\n', 47, "expected a finite number"),
            ("an expression left open", EXPRESSION.replace("x + y", "x +"), 40, "expr is no expression"),
            ("a function that is none", EXPRESSION.replace("x + y", "erf(x) + y"), 40, "expr calls erf, which is not known; there are abs"),
            ("an input without a shape", EXPRESSION.replace("x + y", "x + y + z"), 40, "expr reads z, but shapes gives x, y alone"),
            ("an input that is not read", EXPRESSION.replace("x + y", "x"), 40, "expr does not read y, whose shape is given"),
            ("shapes that do not broadcast", EXPRESSION.replace("[4]]", "[5]]"), 40, "do not broadcast"),
            ("one shape alone", EXPRESSION.replace("[[4], [4]]", "[4]"), 44, "write [4]"),
            ("shapes in quotes", EXPRESSION.replace("[[4], [4]]", '"4"'), 44, "expected a list of lists whose items are each an integer"),
        )
    ),
    Mistake("an extent beside another", "padding = 1", "padding = 1\nf = 3", LINE.format(38), "remove one of them"),
    Mistake("a window beyond the image", "kh = 3", "kh = 32", ENTRY.format(27, "conv"), "the padded image has 16"),
    Mistake("an old CUDA", "[defaults]", '[toolchain]\ncuda = "11"\n\n[defaults]', LINE.format(11), 'write cuda = "11.8" or newer'),
    Mistake("a tool that is not declared", "[defaults]", '[toolchain]\nllvm = "17"\n\n[defaults]', LINE.format(14), "expected one of tvm"),
    Mistake("a limit misspelt", "[defaults]", "[limits]\nbuild_sec = 1\n\n[defaults]", LINE.format(14), 'did you mean "build_secs"?'),
    Mistake("a limit below 0", "[defaults]", "[limits]\nbuild_secs = -1\n\n[defaults]", LINE.format(14), "expected a number above 0"),
    Mistake("a cache without a URL", "[defaults]", '[cache]\nmode = "read"\n\n[defaults]', LINE.format(13), "expected the URL of a server"),
    Mistake("a cache over FTP", "[defaults]", '[cache]\nurl = "ftp://x"\n\n[defaults]', LINE.format(14), "expected the URL of a server"),
    Mistake(
        "a mode that is none",
        "[defaults]",
        '[cache]\nurl = "https://x"\nmode = "rw"\n\n[defaults]',
        LINE.format(15),
        "expected read, read-write",
    ),
    Mistake("a key that is none", "[defaults]", '[trust]\nkeys = ["abc"]\n\n[defaults]', LINE.format(14), 'such as "ed25519:'),
    Mistake(
        "an import from nowhere", "[defaults]", '[import.base]\nurl = "nowhere"\n\n[defaults]', LINE.format(14), '"oci://HOST/NAME:TAG"'
    ),
)

RULES = (
    Mistake("no Python", "def lower(self):", "def lower(self:", "rules/scale.py:17: ", "SyntaxError: '(' was never closed"),
    Mistake("a tab", "    def flops", "\tdef flops", "rules/scale.py:24: ", "inconsistent use of tabs and spaces"),
    Mistake(
        "another class name", "class Scale(Rule)", "class Scaler(Rule)", "rules/scale.py: ", "a class of the file's name, in CamelCase"
    ),
    Mistake("no class", RULE_FILE, "", "rules/scale.py: ", "a class of the file's name, in CamelCase"),
    Mistake("not frozen", "frozen=True, ", "", "rules/scale.py: ", "write @dataclass(frozen=True, kw_only=True)"),
    Mistake(
        "no dataclass", "@dataclass(frozen=True, kw_only=True)\n", "", "rules/scale.py: ", "write @dataclass(frozen=True, kw_only=True)"
    ),
    Mistake("no Rule", "class Scale(Rule)", "class Scale", "rules/scale.py: ", "write class Scale(Rule)"),
    Mistake("no signature", "def signature(", "def sig(", "rules/scale.py: ", "gives no signature(); it returns the kernel's arguments"),
    Mistake("no lower", "def lower(", "def lowered(", "rules/scale.py: ", "gives no lower(); it returns what is computed"),
    Mistake(
        "no reference", "def reference(", "def ref(", "rules/scale.py: ", "gives no reference(); it returns the same, computed by NumPy"
    ),
    Mistake("no flops", "def flops(", "def flop(", "rules/scale.py: ", "gives no flops(); it returns how many operations"),
    Mistake("a module that is missing", "from pathlib import Path", "import torchh", "rules/scale.py:2: ", "No module named 'torchh'"),
    Mistake("a name that is missing", "import Arg,", "import Args,", "rules/scale.py:4: ", "cannot import name 'Args'"),
    Mistake("an error at import", "from pathlib import Path", "from pathlib import Path\n1 / 0", "rules/scale.py:3: ", "ZeroDivisionError"),
    Mistake("an exit at import", "from pathlib import Path", "raise SystemExit(1)", "rules/scale.py:2: ", "SystemExit"),
    Mistake(
        "a type for no TOML", "factor: float = 2.0", "factor: dict = None", "rules/scale.py: ", "expected int, float, bool, str, Literal"
    ),
    Mistake("a default for no TOML", "factor: float = 2.0", "factor: float = None", "rules/scale.py: ", "expected a string, a number"),
    Mistake("a list as default", "factor: float = 2.0", "factor: list = []", "rules/scale.py:7: ", "use default_factory"),
    Mistake("a reserved name", "factor: float = 2.0", "targets: float = 2.0", "rules/scale.py: ", "choose another name"),
    Mistake("an annotation misspelt", "factor: float = 2.0", "factor: Flaot = 2.0", "rules/scale.py:10: ", "name 'Flaot' is not defined"),
    Mistake(
        "problems that fail",
        "    def signature",
        "    def problems(self):\n        return [self.nix]\n\n    def signature",
        "rules/scale.py:15: ",
        "no attribute 'nix'",
    ),
)

POLICIES = (
    Mistake("no Python", "def propose(", "def propose((", "policies/plain.py:7: ", "py_compile"),
    Mistake("no propose", "def propose(", "def suggest(", "policies/plain.py: ", "has no function propose(space, arch, top_k)"),
    Mistake("no templates", 'TEMPLATES = ("unrolled",)\n', "", "policies/plain.py: ", 'write TEMPLATES = ("cpu_matmul",)'),
    Mistake("a template misspelt", '("unrolled",)', '("unroled",)', "policies/plain.py:3: ", 'did you mean "unrolled"?'),
    Mistake("an order for GPUs", "TEMPLATES", 'AUTO = {"gpu": 3}\nTEMPLATES', "policies/plain.py:3: ", 'write AUTO = {"cpu": 40}'),
    Mistake("an order in words", "TEMPLATES", 'AUTO = {"cpu": "first"}\nTEMPLATES', "policies/plain.py:3: ", 'write AUTO = {"cpu": 40}'),
    Mistake("an order left open", "TEMPLATES", 'AUTO = {"cpu": 1\nTEMPLATES', "policies/plain.py:", "policy plain"),
    Mistake("kinds that are none", "TEMPLATES", 'KINDS = ("gpu",)\nTEMPLATES', "policies/plain.py:3: ", 'write KINDS = ("cpu",)'),
    Mistake(
        "a tuner without options", "TEMPLATES", "IS_TUNER = True\nTEMPLATES", "policies/plain.py: ", "write one, or leave out IS_TUNER"
    ),
)

ARCHS = (
    Mistake("no kind", 'kind = "cpu"\n', "", "archs/test-cpu.toml: ", "`kerneldecl doctor --propose-arch`"),
    Mistake("a kind that is none", 'kind = "cpu"', 'kind = "gpu"', "archs/test-cpu.toml:1: ", "expected cpu, or cuda for a GPU"),
    Mistake("no quotes", 'kind = "cpu"', "kind = cpu", "archs/test-cpu.toml:1: ", "not TOML"),
    Mistake("a figure left out", "cores = 2\nvector", "vector", "archs/test-cpu.toml:9: ", "`kerneldecl archs` names files to start from"),
    Mistake("a figure in quotes", "line_bytes = 64", 'line_bytes = "64"', "archs/test-cpu.toml:", "expected an integer above 0"),
    Mistake("a figure misspelt", "line_bytes = 64", "line_bytes = 64\nclock = 3", "archs/test-cpu.toml:", 'did you mean "clock_hz"?'),
)


class Command(NamedTuple):
    """A mistake on the command line, in the folder of the workspace."""

    typed: tuple[str, ...]
    code: int
    says: str
    way_out: str


NO_ARTIFACT = "dist/mine-1.0/host: no such artifact"
COMMANDS = (
    Command(("bild",), 2, "No such command 'bild'", "Did you mean 'build'?"),
    Command(("build", "--retun", "x"), 2, "kerneldecl build: No such option '--retun'", "Did you mean '--retune'?"),
    Command(("build", "-j", "0"), 2, "kerneldecl build: Invalid value for '-j'", "`kerneldecl build --help`"),
    Command(("build", "projecton"), 4, 'no entry matches "projecton"', 'did you mean "projection"?'),
    Command(("build", "projection@h100"), 4, 'no entry matches "projection@h100"', "projection is declared for host"),
    Command(("build", "proj@hots"), 4, 'no entry matches "proj@hots"', 'did you mean "projection@host"?'),
    Command(("build", "qkv*"), 4, 'no entry matches "qkv*"', "`kerneldecl query '*'` lists all"),
    Command(("build", "rule:gemm"), 4, 'no entry matches "rule:gemm"', "lists all"),
    Command(("build", "-D", "topk=3"), 2, '-D: unknown key "topk"', 'did you mean "top_k"?'),
    Command(("build", "--retune", "*", "--locked"), 2, "--retune measures again", "leave out --locked"),
    Command(("build", "--cache", "off"), 2, "--cache needs a shared cache", "declare its url under [cache]"),
    Command(("build", "--scheduler", "tcp://a:1", "--rpc", "a:1/k"), 2, "--scheduler and --rpc", "give one of them"),
    Command(("build", "--no-measure", "--require-measured"), 2, "--no-measure leaves entries unmeasured", "give one of them"),
    Command(("query", "-conv"), 2, "No such option '-c'", "a pattern that takes entries out follows `--`"),
    Command(("show", "nrom"), 4, 'no entry matches "nrom"', 'did you mean "norm"?'),
    Command(("show", "norm", "--source"), 1, "norm@host is not tuned", "run `kerneldecl build norm@host` first"),
    Command(("why",), 2, "kerneldecl why: Missing argument 'ENTRY'", "`kerneldecl why --help`"),
    Command(("export",), 2, "name the entry to export", "--format tar, wheel or hf-kernel exports the artifact"),
    Command(("export", "norm"), 1, "norm@host is not tuned", "run `kerneldecl build norm@host` first"),
    Command(("export", "norm", "--format", "opencl"), 2, "'opencl' is not one of", "'cuda', 'ptx'"),
    Command(("export", "norm", "--name", "a b"), 2, "--name 'a b' is no name of a function", "write letters, digits and underscores"),
    Command(("export", "norm", "--name", "int"), 2, "--name 'int' is no name of a function", "such as my_kernel"),
    Command(("export", "--format", "wheel"), 2, NO_ARTIFACT, "`kerneldecl build` makes it"),
    Command(("verify",), 6, "there is no artifact yet", "`kerneldecl build` makes it"),
    Command(("verify", "dist/nowhere"), 6, "dist/nowhere: there is no artifact yet", "`kerneldecl build` makes it"),
    Command(("verify", "model.so", "--against", "x.onnx"), 2, "model.so: no such file", "`kerneldecl compile` writes one"),
    Command(("run", "model.so"), 2, "model.so: no such file", "`kerneldecl compile` writes one"),
    Command(("bench", "model.onnx"), 2, NO_ARTIFACT, "`kerneldecl build` makes it"),
    Command(("compile", "model.onnx", "-o", "x.so"), 2, NO_ARTIFACT, "`kerneldecl build` makes it"),
    Command(("measure", "nowhere"), 6, "nowhere is no bundle", "`kerneldecl build --no-measure` writes one"),
    Command(("measure", "rules"), 6, "rules is no bundle", "`kerneldecl build --no-measure` writes one"),
    Command(("measure", "x", "--part", "3/2"), 2, "--part '3/2' is no I/N", "such as 2/3, counted from 1"),
    Command(("push", "ghcr.io/x"), 2, "ghcr.io/x is no oci://HOST/NAME:TAG", "oci://HOST/NAME@sha256:DIGEST"),
    Command(("push", "oci://localhost:1/x:1"), 2, NO_ARTIFACT, "`kerneldecl build` makes it"),
    Command(("pull", "x"), 2, "x is no oci://HOST/NAME:TAG", "in small letters"),
    Command(("diff", "workloads.toml"), 6, "not a lock that kerneldecl has written", "name a workloads.lock, an artifact's folder or"),
    Command(("diff", "nowhere"), 2, "nowhere: is no artifact's folder", "name one of them"),
    Command(("gate", "--against", "HEAD", "--budget", "x"), 2, "'x' is no share of time", "write 2% or 0.02"),
    Command(("extract", "nowhere.onnx"), 2, "nowhere.onnx: no such file", "give its path from the folder that you are in"),
    Command(("extract", "table.txt"), 2, "table.txt: not a model by its name", "expected saved Relax IR (.json), ONNX (.onnx)"),
    Command(("extract", "m.onnx", "--dim", "batch"), 2, "--dim batch", "such as --dim n=1,16,128"),
    Command(("init",), 2, "workloads.toml: there is one already", "remove it first or use another folder (-C)"),
    Command(("compare", "--policies", "auto"), 2, "--policies: one policy is no comparison", "name two or more: auto,random"),
    Command(("compare", "--policies", "auto,nix"), 2, '--policies: unknown policy "nix"', "`kerneldecl policies` lists"),
    Command(("log", "last"), 10, "no build has run here", "`kerneldecl build` writes it"),
    Command(("rules", "matmull"), 2, 'unknown rule "matmull"', 'did you mean "matmul"?'),
    Command(("policies", "atuo"), 2, 'unknown policy "atuo"', 'did you mean "auto"?'),
    Command(("templates", "cpu_matmull"), 2, 'unknown template "cpu_matmull"', 'did you mean "cpu_matmul"?'),
    Command(("archs", "h20"), 2, 'unknown arch "h20"', 'did you mean "h200"?'),
    Command(("new", "rule", "My-Rule"), 2, "'My-Rule' cannot be a rule's name", "write small letters, digits and underscores"),
    Command(("new", "rule", "matmul"), 2, "there is a rule matmul already", "choose another name"),
    Command(("new", "template", "x"), 2, "'template' is not one of 'rule', 'policy'", "`kerneldecl new --help`"),
    Command(("completion", "powershell"), 2, "'powershell' is not one of", "'bash', 'zsh', 'fish'"),
    Command(("cache", "gc", "--max-size", "big"), 2, "'big' is not a number with a unit", "KB, MB, GB"),
    Command(("-C", "nowhere", "check"), 2, "no such file in", "`kerneldecl init` writes one"),
    Command(("-C", "policies", "init", "--target", "h20"), 2, 'unknown arch "h20"', 'did you mean "h200"?'),
    Command(("-C", "policies", "init", "--from", "nix.onnx"), 2, "nix.onnx: no such file", "give its path from the folder that you are in"),
)
