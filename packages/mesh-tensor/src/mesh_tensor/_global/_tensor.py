"""The tensor that users hold in the global view, and the issuer of its operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import MeshError
from mesh_tensor._descriptors import HERE, form_of, strides_of
from mesh_tensor._errors import RemoteException, described, part_of
from mesh_tensor._global._sharding import Sharding, placements_of
from mesh_tensor._instructions import HOLE, LIST, NUMBER, SPECIAL
from mesh_tensor._lending import carry
from mesh_tensor._placing import moved
from mesh_tensor._propagate import Hit, Issuer
from mesh_tensor._stream import Ref, Stream, caller
from mesh_tensor._tensor import MeshTensor

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.tensor.placement_types import Placement

    from mesh_core import ProcMesh
    from mesh_tensor._descriptors import Descriptor, Form
    from mesh_tensor._extension import Tensors
    from mesh_tensor._global._mesh import Mesh


_FINITE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


class GlobalTensor(torch.Tensor):
    """A tensor that is spread over a mesh: each process has a part or a copy. Its shape is that of the whole tensor."""

    __slots__ = ("descriptor", "ref")
    descriptor: Descriptor
    ref: Ref

    is_global = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 - as DTensor does

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let the workers do it."""
        first = args[0] if args else None
        if type(first) is not cls:
            first = _first_of((*args, *(kwargs or {}).values()))
            assert first is not None, "PyTorch calls this for tensors of this class only"
        return first.descriptor.stream.issuer.issue(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GlobalTensor({self.descriptor}, mesh={self.mesh})"

    __deepcopy__ = MeshTensor.__deepcopy__
    __reduce_ex__ = MeshTensor.__reduce_ex__
    data_ptr = MeshTensor.data_ptr
    data = MeshTensor.data
    grad = MeshTensor.grad
    device = MeshTensor.device
    is_cuda = MeshTensor.is_cuda
    cuda = MeshTensor.cuda

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert it to another dtype, as in PyTorch. It stays where its mesh has its tensors: `fetch` brings the values to this process."""
        return moved(cast("MeshTensor", self), args, kwargs)

    def cpu(self, *_: Any, **__: Any) -> Any:
        """Return the tensor itself, wherever its mesh has its tensors."""
        return self

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is on."""
        return _stream_of(self).mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The layout: PyTorch's placement for each dimension of the mesh. Waits for the workers."""
        stream = _stream_of(self)
        placed: tuple[Placement, ...] = stream.answers("placements", self.ref.number)[0]
        return placed

    def redistribute(self, sharding: Sharding = None) -> GlobalTensor:
        """Return the same tensor, in another layout. Gradients flow through."""
        try:
            placements = placements_of(sharding, self.mesh.mesh_dim_names, self.shape)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{error}. The tensor is {described(self)}") from None
        result: GlobalTensor = _Redistribute.apply(self, placements)
        return result

    def tolist(self) -> Any:
        """Wait for the tensor, and return all of it as Python numbers."""
        return whole(self).tolist()

    def full_tensor(self) -> torch.Tensor:
        """Wait for the tensor, and return all of it as an ordinary tensor of this process."""
        return whole(self)


def _first_of(values: Iterable[Any]) -> GlobalTensor | None:
    for each in values:
        if type(each) is GlobalTensor:
            return each
        if isinstance(each, (list, tuple)) and (found := _first_of(each)) is not None:
            return found
    return None


def _stream_of(tensor: GlobalTensor) -> GlobalStream:
    stream = tensor.descriptor.stream
    assert isinstance(stream, GlobalStream)
    return stream


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Any, placements: tuple[Placement, ...]) -> Any:
        issuer = tensor.descriptor.stream.issuer
        made = (tuple(tensor.shape), tensor.dtype)
        return issuer.special("redistribute", made, (tensor,), (placements,), placements)

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        # The layout of a gradient does not matter to its receiver.
        return grads[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, placements: tuple[tuple[Placement, ...], ...], *tensors: Any) -> Any:
        context.set_materialize_grads(False)
        return tuple(gathered_values(tensors, placements))

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        return None, *grads


def gathered_values(tensors: Sequence[Any], placements: tuple[tuple[Placement, ...], ...]) -> list[Any]:
    """Return tensors with other layouts, as many as possible in one message between the processes; without gradients."""
    issuer = tensors[0].descriptor.stream.issuer

    def learn() -> Hit:
        made = [
            issuer.stream.descriptor(
                (tuple(each.shape), strides_of(tuple(each.shape)), 0, each.dtype, each.device)
            )
            for each in tensors
        ]
        arguments = [*[HOLE] * len(tensors), placements]
        template = issuer.stream.teach(
            ((SPECIAL, "gather", ""), None), arguments, {}, len(tensors), len(made), LIST, ()
        )
        return Hit(template, list(made), 0, True)

    key = ("gather", placements, *[each.descriptor for each in tensors])
    made: list[Any]
    _, made = issuer.function(key, learn, list(tensors))
    return made


class _LaidOutAs(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Any, other: Any) -> Any:
        issuer = tensor.descriptor.stream.issuer
        return issuer.special("like", (tuple(tensor.shape), tensor.dtype), (tensor, other), ())

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        return grads[0], None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Any, dim: str) -> Any:
        issuer = tensor.descriptor.stream.issuer
        return issuer.special("summed", (tuple(tensor.shape), tensor.dtype), (tensor,), (dim,), dim)

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        return grads[0], None


def laid_out_as(tensor: torch.Tensor, other: GlobalTensor) -> torch.Tensor:
    """Return the same tensor, with the layout of another one."""
    result: torch.Tensor = _LaidOutAs.apply(tensor, other.detach())
    return result


def gathered(
    tensors: Sequence[torch.Tensor], placements: Sequence[tuple[Placement, ...]]
) -> tuple[torch.Tensor, ...]:
    """Return tensors with other layouts, as many as possible in one message between the processes. Gradients flow through."""
    result: tuple[torch.Tensor, ...] = _Gathered.apply(tuple(placements), *tensors)
    return result


def summed(tensor: torch.Tensor, dim: str) -> torch.Tensor:
    """Return the same tensor, with the sum along a dimension of the mesh in which each process has a summand."""
    result: torch.Tensor = _Summed.apply(tensor, dim)
    return result


def whole(tensor: GlobalTensor, timeout: float | None = None) -> torch.Tensor:
    """Wait for it, and return all of it."""
    value: torch.Tensor = _stream_of(tensor).answers("whole", tensor.ref.number, timeout=timeout)[0]
    return value


def part(tensor: GlobalTensor, coords: dict[str, int], timeout: float | None = None) -> torch.Tensor:
    """Wait for it, and return the part of the process at these coordinates."""
    stream = _stream_of(tensor)
    sizes = stream.procs.sizes
    chosen = part_of(tensor, stream.procs, {dim: coords.get(dim, 0) for dim in sizes} | coords)
    value: torch.Tensor = stream.answers("part_of", tensor.ref.number, of=chosen, timeout=timeout)[0]
    return value


class GlobalStream(Stream):
    """Messages from this process to the processes of a mesh in the global view.

    STM-3: all processes of the mesh carry out the same instructions, so that they meet in each collective. A process in which an
    operator fails has something of the right form in the place of its result, continues with that, and reports the failure when it is asked.
    """

    issuer_class: type[GlobalIssuer]

    def __init__(self, tensors: Tensors, mesh: Mesh) -> None:
        super().__init__(tensors, mesh.procs, GlobalTensor)
        self.mesh = mesh
        self.issuer_class(self, GlobalTensor)
        self.number = 0
        self.stopped = False
        self.join()

    def join(self) -> None:
        """Have the processes meet."""
        names = self.mesh.mesh_dim_names
        kind = self.mesh.device.type
        if kind not in HERE:
            # Each process chooses its device before it is in a group of such devices.
            self.issuer.use_device(kind)
        on_cpu = [self.groups.along((name,))[0] for name in names]
        groups = [self.groups.along((name,), kind)[0] for name in names]
        ranks = self.groups.ranks()
        self.number = next(self.tensors.groups)
        self._tell("enter", self.number, names, self.mesh.shape, kind, groups, on_cpu, ranks)

    def stop(self) -> None:
        """Make everything that is done with tensors of the mesh raise from now on."""
        with self.lock:
            if not self.broken:
                self.leave()
            self.stopped = self.broken = True

    def leave(self) -> None:
        """Let the processes drop what they have of the mesh."""
        self._tell("exit", self.number)

    def check(self) -> None:
        """After processes were restarted: no tensor is whole any longer (STM-2), and all processes meet again."""
        with self.lock, _disable_current_modes():
            if self.stopped:
                raise MeshError(
                    f"{self.mesh} was stopped, and its tensors are gone: make another mesh to go on"
                )
            if not self.broken:
                return
            before = self.lives
            super().check()
            if self.lives != before:
                self.leave()
                self.join()

    def agreed_on(self, question: str, *rest: Any) -> Any:
        """Ask all processes, which must agree, and return their answer."""
        self.check()
        return self.agreed("within", self.number, question, *rest)

    def tell(self, what: str, *rest: Any) -> None:
        """Let all processes do something."""
        with self.lock:
            self.flush()
            self._tell("within", self.number, what, *rest)

    def teach(self, *what: Any) -> int:
        """Teach the workers a template, and return its number."""
        with self.lock:
            number: int = next(self.tensors.templates)
            self.flush()
            self._tell("within", self.number, "know", number, what)
            return number

    def put(self, value: torch.Tensor) -> Ref:
        """Give the workers a tensor that all have a copy of."""
        return self.place(value, placements_of(None, self.mesh.mesh_dim_names, value.shape))

    def place(self, value: torch.Tensor, placements: tuple[Placement, ...]) -> Ref:
        """Give the workers a tensor, of which each keeps its part."""
        with self.lock, _disable_current_modes():
            ref = self.ref()
            if self.tensors.recorders:
                self.tensors.recorded(lambda recorder: recorder.constant(self, ref, value, placements))
            self._send_instructions()
            value = value.detach()
            # Formulas of PyTorch's may ask for nothing but forms, by tensors without values.
            value = value if value.is_meta else value.to("cpu")
            self._tell("within", self.number, "put", ref.number, value, placements)
            return ref

    def answers(
        self, question: str, *rest: Any, of: ProcMesh | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Ask all processes, or some, and return their answers, in the order of their ranks."""
        self.check()
        with _disable_current_modes():
            answers = self.wait(self.ask("within", self.number, question, *rest, of=of), timeout)
            try:
                return [self.value(point, answer) for point, answer in answers]
            except RemoteException as error:
                if self.procs.failed():
                    raise self.loss() from error
                raise


class GlobalIssuer(Issuer):
    """Issues the operators of one mesh in the global view."""

    stream: GlobalStream

    def __init__(self, stream: GlobalStream, cls: type) -> None:
        super().__init__(stream, cls)
        self._random: dict[int, tuple[bool, OpOverload]] = {}
        """Of PyTorch's operators, by identity, whether they draw random numbers."""
        self.seeding: int | None = None

    def clear(self) -> None:
        """Forget what the workers know, because they have forgotten it."""
        super().clear()
        self.seeding = None

    def home(self, device: torch.device) -> torch.device:
        """Return where a mesh has what lies in this process on that device."""
        own = self.stream.mesh.device
        if device.type not in {own.type, "cpu", "meta"}:
            raise ValueError(
                f"{self.stream.mesh} has its tensors on {str(own)!r}, got one on {str(device)!r}: move it to the CPU first, "
                f"or make a mesh with device={device.type!r}"
            )
        return device if device.type == "meta" else own

    def issue(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Let the workers do it; random numbers come from a seed that this process draws."""
        if func is _FINITE and (here := self._stranger(args[1])) is not None:
            # What GradScaler keeps of each optimizer, and reads next, is a tensor of this process.
            found = self.share(here)
            super().issue(func, (args[0], found, *args[2:]), kwargs)
            here.copy_(whole(found))
            return None
        if kwargs and (named := kwargs.get("device")) is not None and self.stream.mesh.device.type != "cpu":
            # To PyTorch in this process the mesh's tensors are the CPU's.
            kwargs = kwargs | {"device": self.home(named)}
        known = self._random.get(id(func))
        if known is None:
            known = self._random[id(func)] = _is_random(func), func
        if not known[0]:
            return super().issue(func, args, kwargs)
        stream = self.stream
        with _disable_current_modes():
            seed = int(torch.empty((), dtype=torch.int64).random_())
        with stream.lock:
            stream.check()
            if self.seeding is None:
                self.seeding = stream.teach(((SPECIAL, "seed", ""), None), [NUMBER], {}, 0, 0, 0, ())
            stream.append(self.seeding, 0, [], [seed], caller())
            return super().issue(func, args, kwargs)

    def distribute(self, value: torch.Tensor, placements: tuple[Placement, ...]) -> GlobalTensor:
        """Give each process its part of a tensor."""
        self.stream.check()
        value = value.detach().contiguous()
        shape, strides, _, dtype, device = form_of(value)
        descriptor = self.stream.descriptor((shape, strides, 0, dtype, self.home(device)))
        ref, frame = self.stream.place(value, placements), caller()
        ref.at = frame.f_code, frame.f_lasti
        result: GlobalTensor = self._made(descriptor, ref)
        return result

    def made(self, form: Form, ref: Ref) -> GlobalTensor:
        """Return the mesh tensor for a tensor that workers have."""
        result: GlobalTensor = self._made(self.stream.descriptor(form), ref)
        return result

    def _why_not_given(self, value: torch.Tensor, most: int | None) -> str | None:
        if isinstance(value, MeshTensor):
            return (
                f"a tensor of the per-rank view, {value.descriptor} on {value.procs}, meets tensors of the global view, "
                f"on {self.stream.mesh}: fetch() one of them, and distribute() it or share() it. The first is {described(value)}"
            )
        return super()._why_not_given(value, most)

    def _where(self) -> object:
        mesh = self.stream.mesh
        return self.stream.procs if mesh.on_devices is None else mesh

    def _how_to_meet(self, other: MeshTensor) -> str:
        mesh, its = self.stream.mesh, getattr(other.descriptor.stream, "mesh", None)
        if its is not None and (mesh.on_devices is its or its.on_devices is mesh):
            return (
                "A parameter that module_to_mesh(offload=) has put in the hosts' memory is on the devices while its module computes: use it in "
                "that module's forward(), or fetch() and distribute() one of the two."
            )
        return "Move them to one first, with fetch() and distribute()."

    def _place(self) -> tuple[object, str]:
        return self.stream.mesh, "distribute(), or have it made there, with activate()"


GlobalStream.issuer_class = GlobalIssuer


def _is_random(func: OpOverload) -> bool:
    # Attention is marked as random, but it only is with dropout, which it is not called with on a CPU.
    name: str = func._schema.name  # noqa: SLF001 - as the whole of PyTorch reads it
    return torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in name


def stream_of(
    tensors: Tensors, mesh: Mesh, procs: ProcMesh, kind: type[GlobalStream] = GlobalStream
) -> GlobalStream:
    """Return a stream to the processes, which keep tensors from now on."""
    if not procs.alive():
        raise MeshError(f"{procs} has no processes")
    carry(GlobalTensor)
    tensors.have_tensors_on(procs)
    made = kind(tensors, mesh)
    tensors.have_recorded(made)
    return made
