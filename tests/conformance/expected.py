"""Where structlin differs from what torch's tests want: suite -> pattern of names -> the reason.

A difference that is not here fails the suite, and so does a line here that no difference matches.
"""

NAMES = "the model that owns a parameter gives its name, so it may have another or none here"
STRIDES = "autograd.grad gives a core's gradient transposed where torch's products run (no engine)"

EXPECTED = {
    "modules": {},
    "optimizers": {
        "structlin_Muon-train-*ns_*": "the coefficients and steps of a schedule are its method",
        "structlin_Muon-error-all optimizer params *": NAMES,
        "structlin_Muon-error-all optimizer param groups *": NAMES,
        "structlin_Muon-error-only support 2D parameters": "cores have three dimensions",
        "structlin_Muon-error-only support `original`*": "another text, which names the choices",
        "structlin_Muon-error-*complex parameters": "another text, and a TypeError",
    },
    "operators": {},
    "test_modules.py": {"test_memory_format_*": STRIDES},
    "test_optim.py": {
        "test_can_load_from_to_named_state_dict_*_structlin_Muon_*": NAMES,
        "test_errors_structlin_Muon_*": "what differs above in errors",
    },
}
