"""What jax's lowering does not write on a module: aliases, shardings, counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

# jaxlib 0.10.2: MLIR bindings; ``ir`` edits attributes.
from jaxlib.mlir import ir

# jaxlib 0.10.2: XLA's call inliner reads "inlineable" among these
_FRONTEND: Final = "mhlo.frontend_attributes"


def set_module_counts(module: ir.Module, num_replicas: int, num_partitions: int) -> None:
    """Write the numbers of replicas and partitions on a module."""
    with module.context:
        i32 = ir.IntegerType.get_signless(32)
        module.operation.attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(i32, num_replicas)
        module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(i32, num_partitions)


def annotate(
    module: ir.Module,
    aliases: Sequence[tuple[int, int]],
    input_shardings: Sequence[str | None],
    output_shardings: Sequence[str | None],
) -> None:
    """Write aliases and shardings on the arguments and results of ``main``."""
    if not (aliases or any(input_shardings) or any(output_shardings)):
        return
    main = _main_function(module)
    with module.context:
        arguments, results = _attribute_dicts(main)
        _check_aliases(main, aliases)
        i32 = ir.IntegerType.get_signless(32)
        for source, target in aliases:
            arguments[source]["tf.aliasing_output"] = ir.IntegerAttr.get(i32, target)
        _add_shardings(arguments, input_shardings, "input")
        _add_shardings(results, output_shardings, "output")
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in arguments])
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(r) for r in results])


def _main_function(module: ir.Module) -> ir.Operation:
    for operation in module.body.operations:
        if operation.operation.name == "func.func" and operation.name.value == "main":
            return operation
    raise ValueError("the module has no function named main")


def _attribute_dicts(
    main: ir.Operation,
) -> tuple[list[dict[str, ir.Attribute]], list[dict[str, ir.Attribute]]]:
    counts = (len(main.type.inputs), len(main.type.results))
    dicts = []
    for key, count in zip(("arg_attrs", "res_attrs"), counts, strict=True):
        present = main.attributes[key] if key in main.attributes else [{}] * count
        dicts.append([_as_dict(attribute) for attribute in present])
    return dicts[0], dicts[1]


def _as_dict(attribute: ir.Attribute) -> dict[str, ir.Attribute]:
    if isinstance(attribute, dict):
        return dict(attribute)
    return {named.name: named.attr for named in map(attribute.__getitem__, range(len(attribute)))}


def _check_aliases(main: ir.Operation, aliases: Iterable[tuple[int, int]]) -> None:
    inputs, outputs = main.type.inputs, main.type.results
    sources: set[int] = set()
    targets: set[int] = set()
    for source, target in aliases:
        if not (0 <= source < len(inputs) and 0 <= target < len(outputs)):
            raise ValueError(
                f"alias ({source}, {target}) is out of range: the program has {len(inputs)} "
                f"inputs and {len(outputs)} outputs"
            )
        if source in sources or target in targets:
            raise ValueError(f"alias ({source}, {target}) uses an input or output a second time")
        if inputs[source] != outputs[target]:
            raise ValueError(
                f"alias ({source}, {target}) pairs {inputs[source]} with {outputs[target]}; "
                "donated memory needs the same shape and dtype"
            )
        sources.add(source)
        targets.add(target)


def _add_shardings(
    attributes: list[dict[str, ir.Attribute]], shardings: Sequence[str | None], what: str
) -> None:
    if not shardings:
        return
    if len(shardings) != len(attributes):
        raise ValueError(f"{len(shardings)} shardings for {len(attributes)} {what}s; give one each")
    for entry, sharding in zip(attributes, shardings, strict=True):
        if sharding is not None:
            entry["mhlo.sharding"] = ir.StringAttr.get(sharding)


def pin_unannotated_inputs(module: ir.Module) -> None:
    """Declare inputs without a sharding replicated: Shardy would choose one, unseen."""
    mesh = next(
        (op.sym_name.value for op in module.body.operations if op.operation.name == "sdy.mesh"),
        None,
    )
    if mesh is None:
        return
    main = _main_function(module)
    with module.context:
        arguments, _ = _attribute_dicts(main)
        for entry, kind in zip(arguments, main.type.inputs, strict=True):
            if "sdy.sharding" not in entry:
                dimensions = ", ".join(["{}"] * kind.rank)
                entry["sdy.sharding"] = ir.Attribute.parse(
                    f"#sdy.sharding<@{mesh}, [{dimensions}]>"
                )
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in arguments])


def all_operations(block: ir.Block) -> Iterator[ir.Operation]:
    """The operations of a block, and those of the regions inside, in order.

    ``Operation.walk`` of MLIR makes a RuntimeError of whatever its callback raises, Ctrl-C's exception included.
    """
    for operation in block.operations:
        yield operation.operation
        for region in operation.operation.regions:
            for inner in region.blocks:
                yield from all_operations(inner)


def keep_functions(module: ir.Module, wanted: Callable[[str], bool]) -> None:
    """Mark calls of the functions with ``wanted`` names, so that XLA does not inline them."""
    with module.context:
        attributes = ir.DictAttr.get({"inlineable": ir.StringAttr.get("false")})
        for name, call in _calls(module):
            if wanted(name):
                call.attributes[_FRONTEND] = attributes


def release_functions(module: ir.Module, names: Collection[str]) -> None:
    """Let XLA inline the functions ``names`` that ``keep_functions`` has marked."""
    for name, call in _calls(module):
        if name in names and _FRONTEND in call.attributes:
            del call.attributes[_FRONTEND]


def _calls(module: ir.Module) -> Iterator[tuple[str, ir.Operation]]:
    """The calls in the module's functions, with the names of those that they call."""
    for function in module.body.operations:
        if function.operation.name == "func.func":
            for operation in function.regions[0].blocks[0].operations:
                if operation.operation.name == "func.call":
                    yield ir.FlatSymbolRefAttr(operation.attributes["callee"]).value, operation
