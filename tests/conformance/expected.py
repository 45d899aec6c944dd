"""Where structlin differs from what torch's tests want: suite -> pattern of names -> the reason.

A difference that is not here fails the suite, and so does a line here that no difference matches.
"""

NAMES = "the model that owns a parameter gives its name, so it may have another or none here"
STRIDES = "autograd.grad gives a core's gradient transposed where torch's products run (no engine)"

OPTIMIZERS = {
    "train-*ns_*": "the coefficients and steps of a schedule are its method",
    "error-all optimizer params *": NAMES,
    "error-all optimizer param groups *": NAMES,
    "error-only support 2D parameters": "cores have three dimensions",
    "error-only support `original`*": "another text, which names the choices",
    "error-*complex parameters": "AdamW steps complex matrices",
}
EXPECTED = {
    "modules": {},
    "optimizers": {
        f"structlin_{kind}-{name}": reason
        for kind in ("Muon", "SOAP")
        for name, reason in OPTIMIZERS.items()
    },
    "operators": {},
    "test_modules.py": {"test_memory_format_*": STRIDES},
    "test_optim.py": {
        "test_can_load_from_to_named_state_dict_*_structlin_Muon_*": NAMES,
        "test_errors_structlin_Muon_*": "what differs above in errors",
    },
}
