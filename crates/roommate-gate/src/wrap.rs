//! The functions of the driver that the program gets instead of the real ones.
//!
//! One name may stand for several real functions: what the driver's library exports, what
//! `cuGetProcAddress` returns, and what another preloaded library puts before them need not be the
//! same. So for each name there are several wrappers, each with a real function of its own; mixing
//! them up could make two libraries call each other for ever.

use crate::driver::{Code, Handle, NO_DRIVER, SUCCESS};
use crate::find;
use crate::gate::{Launch, pass};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the driver that has wrappers, as its place in `NAMES`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Function(usize);

const KERNEL: usize = 0;
const KERNEL_EX: usize = 2;
const COOPERATIVE: usize = 4;
const GRAPH: usize = 6;
const PROC_ADDRESS: usize = 8;

/// Each launch is followed by its variant for which no stream means the thread's own stream.
const NAMES: [&CStr; 10] = [
    c"cuLaunchKernel",
    c"cuLaunchKernel_ptsz",
    c"cuLaunchKernelEx",
    c"cuLaunchKernelEx_ptsz",
    c"cuLaunchCooperativeKernel",
    c"cuLaunchCooperativeKernel_ptsz",
    c"cuGraphLaunch",
    c"cuGraphLaunch_ptsz",
    c"cuGetProcAddress",
    c"cuGetProcAddress_v2",
];

/// Real functions of one name that can be told apart; more are handed out as they are.
const REALS: usize = 4;
/// The place of the real function behind an exported symbol.
const EXPORTED: usize = REALS;

type Reals = [AtomicPtr<c_void>; REALS + 1];
static REAL: [Reals; NAMES.len()] =
    [const { [const { AtomicPtr::new(ptr::null_mut()) }; REALS + 1] }; NAMES.len()];

impl Function {
    /// The function with this name, if it has wrappers.
    pub(crate) fn named(name: &CStr) -> Option<Self> {
        let name = name.to_bytes();
        // Nearly all names that are looked up end here.
        if !name.starts_with(b"cu") {
            return None;
        }
        NAMES.iter().position(|n| n.to_bytes() == name).map(Self)
    }

    pub(crate) fn name(self) -> &'static CStr {
        NAMES[self.0]
    }

    /// What `cuGetProcAddress` means by a name: for launches, one name for both variants.
    fn asked(name: &CStr, flags: u64) -> Option<Self> {
        const PER_THREAD_DEFAULT_STREAM: u64 = 2;
        let Self(place) = Self::named(name)?;
        let has_variant = place < PROC_ADDRESS && place.is_multiple_of(2);
        let is_variant = has_variant && flags & PER_THREAD_DEFAULT_STREAM != 0;
        Some(Self(place + usize::from(is_variant)))
    }

    /// The wrapper around the real function at this place.
    fn wrapper(self, place: usize) -> *mut c_void {
        macro_rules! at_each_place {
            ($wrapper:ident, $function:expr) => {
                [
                    $wrapper::<{ $function }, 0> as *mut c_void,
                    $wrapper::<{ $function }, 1> as *mut c_void,
                    $wrapper::<{ $function }, 2> as *mut c_void,
                    $wrapper::<{ $function }, 3> as *mut c_void,
                ][place]
            };
        }
        match self.0 {
            KERNEL => at_each_place!(kernel, KERNEL),
            1 => at_each_place!(kernel, KERNEL + 1),
            KERNEL_EX => at_each_place!(kernel_ex, KERNEL_EX),
            3 => at_each_place!(kernel_ex, KERNEL_EX + 1),
            COOPERATIVE => at_each_place!(cooperative, COOPERATIVE),
            5 => at_each_place!(cooperative, COOPERATIVE + 1),
            GRAPH => at_each_place!(graph, GRAPH),
            7 => at_each_place!(graph, GRAPH + 1),
            PROC_ADDRESS => at_each_place!(proc_address, PROC_ADDRESS),
            _ => at_each_place!(proc_address, PROC_ADDRESS + 1),
        }
    }
}

/// What the program gets instead of a real function.
pub(crate) fn wrapped(function: Function, real: NonNull<c_void>) -> NonNull<c_void> {
    // A search of everything finds this library's own symbol, which needs no second wrapper.
    if find::is_ours(real) {
        return real;
    }
    let place = REAL[function.0][..REALS].iter().position(|known| {
        let (yes, no) = (Ordering::AcqRel, Ordering::Acquire);
        match known.compare_exchange(ptr::null_mut(), real.as_ptr(), yes, no) {
            Ok(_) => true,
            Err(now) => now == real.as_ptr(),
        }
    });
    place.and_then(|place| NonNull::new(function.wrapper(place))).unwrap_or(real)
}

/// The real function behind a wrapper; `None` if it is that of a symbol and there is no driver.
#[inline]
fn real<const FUNCTION: usize, const PLACE: usize>() -> Option<NonNull<c_void>> {
    let known = &REAL[FUNCTION][PLACE];
    NonNull::new(known.load(Ordering::Acquire)).or_else(|| find_real(FUNCTION, known))
}

#[cold]
fn find_real(function: usize, known: &AtomicPtr<c_void>) -> Option<NonNull<c_void>> {
    let found = find::next(NAMES[function], true);
    if let Some(found) = found {
        known.store(found.as_ptr(), Ordering::Release);
    }
    found
}

/// A launch of this function, or graph, in this many blocks, with a stream as the program named it.
fn launch<const FUNCTION: usize>(stream: Handle, function: Handle, grid: [Side; 3]) -> Launch {
    /// The thread's own stream, in any function of the driver.
    const PER_THREAD: usize = 2;
    let is_own = FUNCTION % 2 == 1 && stream.is_null();
    let stream = if is_own { ptr::without_provenance_mut(PER_THREAD) } else { stream };
    let [x, y, z] = grid.map(u64::from);
    let kernel = (function.addr() as u64).rotate_left(32) ^ x.wrapping_mul(y).wrapping_mul(z);
    Launch { stream, is_graph: FUNCTION / 2 * 2 == GRAPH, kernel }
}

/// Size of a grid or of a block.
type Side = c_uint;
type Pointers = *mut *mut c_void;

unsafe extern "C" fn kernel<const FUNCTION: usize, const PLACE: usize>(
    function: Handle,
    grid_x: Side,
    grid_y: Side,
    grid_z: Side,
    block_x: Side,
    block_y: Side,
    block_z: Side,
    shared_bytes: c_uint,
    stream: Handle,
    arguments: Pointers,
    extra: Pointers,
) -> Code {
    type Real = unsafe extern "C" fn(
        Handle,
        Side,
        Side,
        Side,
        Side,
        Side,
        Side,
        c_uint,
        Handle,
        Pointers,
        Pointers,
    ) -> Code;
    let Some(real) = real::<FUNCTION, PLACE>() else { return NO_DRIVER };
    // SAFETY: the real function of this name has this type.
    let real = unsafe { transmute::<*mut c_void, Real>(real.as_ptr()) };
    // SAFETY: what the program asked for.
    pass(&launch::<FUNCTION>(stream, function, [grid_x, grid_y, grid_z]), || unsafe {
        real(
            function,
            grid_x,
            grid_y,
            grid_z,
            block_x,
            block_y,
            block_z,
            shared_bytes,
            stream,
            arguments,
            extra,
        )
    })
}

unsafe extern "C" fn cooperative<const FUNCTION: usize, const PLACE: usize>(
    function: Handle,
    grid_x: Side,
    grid_y: Side,
    grid_z: Side,
    block_x: Side,
    block_y: Side,
    block_z: Side,
    shared_bytes: c_uint,
    stream: Handle,
    arguments: Pointers,
) -> Code {
    type Real = unsafe extern "C" fn(
        Handle,
        Side,
        Side,
        Side,
        Side,
        Side,
        Side,
        c_uint,
        Handle,
        Pointers,
    ) -> Code;
    let Some(real) = real::<FUNCTION, PLACE>() else { return NO_DRIVER };
    // SAFETY: the real function of this name has this type.
    let real = unsafe { transmute::<*mut c_void, Real>(real.as_ptr()) };
    // SAFETY: what the program asked for.
    pass(&launch::<FUNCTION>(stream, function, [grid_x, grid_y, grid_z]), || unsafe {
        real(
            function,
            grid_x,
            grid_y,
            grid_z,
            block_x,
            block_y,
            block_z,
            shared_bytes,
            stream,
            arguments,
        )
    })
}

/// The beginning of the driver's description of a launch, which may grow at its end.
#[repr(C)]
pub(crate) struct Config {
    grid: [Side; 3],
    block: [Side; 3],
    shared_bytes: c_uint,
    stream: Handle,
}

unsafe extern "C" fn kernel_ex<const FUNCTION: usize, const PLACE: usize>(
    config: *const Config,
    function: Handle,
    arguments: Pointers,
    extra: Pointers,
) -> Code {
    type Real = unsafe extern "C" fn(*const Config, Handle, Pointers, Pointers) -> Code;
    let Some(real) = real::<FUNCTION, PLACE>() else { return NO_DRIVER };
    // SAFETY: the real function of this name has this type.
    let real = unsafe { transmute::<*mut c_void, Real>(real.as_ptr()) };
    // SAFETY: null, which is for the driver to refuse, or the program's description.
    let about = unsafe { config.as_ref() }.map(|config| (config.stream, config.grid));
    let (stream, grid) = about.unwrap_or((ptr::null_mut(), [0; 3]));
    let launch = launch::<FUNCTION>(stream, function, grid);
    // SAFETY: what the program asked for.
    pass(&launch, || unsafe { real(config, function, arguments, extra) })
}

unsafe extern "C" fn graph<const FUNCTION: usize, const PLACE: usize>(
    graph: Handle,
    stream: Handle,
) -> Code {
    type Real = unsafe extern "C" fn(Handle, Handle) -> Code;
    let Some(real) = real::<FUNCTION, PLACE>() else { return NO_DRIVER };
    // SAFETY: the real function of this name has this type.
    let real = unsafe { transmute::<*mut c_void, Real>(real.as_ptr()) };
    // SAFETY: what the program asked for.
    pass(&launch::<FUNCTION>(stream, graph, [0; 3]), || unsafe { real(graph, stream) })
}

/// Both versions of the function. The first has no `status`; it is then whatever the register of
/// the fifth argument held, and is handed on to a function that does not look at it either. Which
/// version a pointer is depends on the CUDA version that was asked for, and a mistake about that
/// would make the driver write to an address that nobody passed.
unsafe extern "C" fn proc_address<const FUNCTION: usize, const PLACE: usize>(
    name: *const c_char,
    into: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_void,
) -> Code {
    type Real =
        unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_void) -> Code;
    let Some(real) = real::<FUNCTION, PLACE>() else { return NO_DRIVER };
    // SAFETY: the real function of this name has this type, or lacks the last argument.
    let real = unsafe { transmute::<*mut c_void, Real>(real.as_ptr()) };
    // SAFETY: what the program asked for.
    let code = unsafe { real(name, into, version, flags, status) };
    if code != SUCCESS || crate::leases().is_none() || name.is_null() || into.is_null() {
        return code;
    }
    // SAFETY: the driver has read the name up to its zero, and written the pointer.
    let (name, found) = unsafe { (CStr::from_ptr(name), *into) };
    if let Some((function, found)) = Function::asked(name, flags).zip(NonNull::new(found)) {
        // SAFETY: the driver has just written there.
        unsafe { *into = wrapped(function, found).as_ptr() };
    }
    code
}

/// The symbols that a program linked with the driver's library finds first.
#[allow(non_snake_case, reason = "the names of the driver")]
mod exported {
    use super::{
        COOPERATIVE, Code, Config, EXPORTED, GRAPH, Handle, KERNEL, KERNEL_EX, PROC_ADDRESS,
        Pointers, Side, c_char, c_int, c_uint, c_void,
    };

    macro_rules! export {
        ($($symbol:ident = $wrapper:ident($function:expr)
            ($($argument:ident: $type:ty),*);)*) => {$(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $symbol($($argument: $type),*) -> Code {
                // SAFETY: what the program asked for.
                unsafe { super::$wrapper::<{ $function }, EXPORTED>($($argument),*) }
            }
        )*};
    }

    export! {
        cuLaunchKernel = kernel(KERNEL)(
            f: Handle, gx: Side, gy: Side, gz: Side, bx: Side, by: Side, bz: Side,
            bytes: c_uint, stream: Handle, arguments: Pointers, extra: Pointers
        );
        cuLaunchKernel_ptsz = kernel(KERNEL + 1)(
            f: Handle, gx: Side, gy: Side, gz: Side, bx: Side, by: Side, bz: Side,
            bytes: c_uint, stream: Handle, arguments: Pointers, extra: Pointers
        );
        cuLaunchKernelEx = kernel_ex(KERNEL_EX)(
            config: *const Config, f: Handle, arguments: Pointers, extra: Pointers
        );
        cuLaunchKernelEx_ptsz = kernel_ex(KERNEL_EX + 1)(
            config: *const Config, f: Handle, arguments: Pointers, extra: Pointers
        );
        cuLaunchCooperativeKernel = cooperative(COOPERATIVE)(
            f: Handle, gx: Side, gy: Side, gz: Side, bx: Side, by: Side, bz: Side,
            bytes: c_uint, stream: Handle, arguments: Pointers
        );
        cuLaunchCooperativeKernel_ptsz = cooperative(COOPERATIVE + 1)(
            f: Handle, gx: Side, gy: Side, gz: Side, bx: Side, by: Side, bz: Side,
            bytes: c_uint, stream: Handle, arguments: Pointers
        );
        cuGraphLaunch = graph(GRAPH)(exec: Handle, stream: Handle);
        cuGraphLaunch_ptsz = graph(GRAPH + 1)(exec: Handle, stream: Handle);
        cuGetProcAddress = proc_address(PROC_ADDRESS)(
            name: *const c_char, into: *mut *mut c_void, version: c_int, flags: u64,
            status: *mut c_void
        );
        cuGetProcAddress_v2 = proc_address(PROC_ADDRESS + 1)(
            name: *const c_char, into: *mut *mut c_void, version: c_int, flags: u64,
            status: *mut c_void
        );
    }
}
