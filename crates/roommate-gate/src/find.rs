//! How the program finds the driver's functions, and how this library finds the real ones.

use crate::wrap::{self, Function};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// Versions of `dlsym` in glibc: since it is part of the C library itself, and the first one.
#[cfg(target_arch = "x86_64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.2.5"];
#[cfg(target_arch = "aarch64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.17"];

/// What `dlsym` shall do: return `answer`, or, if `go_on` is not null, go on there with the
/// arguments it was called with.
#[repr(C)]
struct Reply {
    answer: *mut c_void,
    go_on: *mut c_void,
}

/// The program's `dlsym`. The real one looks at its return address to know who asks, which matters
/// for `RTLD_NEXT` and `RTLD_DEFAULT`. So it is not called but jumped to, with the registers and
/// the stack as they were.
///
/// # Safety
///
/// As for the real one: the name ends with a zero.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "endbr64",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {reply}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jz 2f",
        "jmp rdx",
        "2:",
        "ret",
        reply = sym reply,
    )
}

/// The same for the other processor.
///
/// # Safety
///
/// As for the real one: the name ends with a zero.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "bl {reply}",
        "mov x9, x0",
        "mov x16, x1",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbz x16, 2f",
        "br x16",
        "2:",
        "mov x0, x9",
        "ret",
        reply = sym reply,
    )
}

/// Must not allocate for names that are not ours: an allocator may be looking for the next one.
unsafe extern "C" fn reply(handle: *mut c_void, name: *const c_char) -> Reply {
    let real = real_dlsym();
    let go_on = real.map_or(ptr::null_mut(), |real| real as *mut c_void);
    let pass = Reply { answer: ptr::null_mut(), go_on };
    // Who asks for the next one stands before the driver like this library: it shall get what
    // comes after it, be it the driver or this library.
    if crate::leases().is_none() || handle == libc::RTLD_NEXT || name.is_null() {
        return pass;
    }
    // SAFETY: the caller's name ends with a zero.
    let Some(function) = Function::named(unsafe { CStr::from_ptr(name) }) else { return pass };
    if handle == libc::RTLD_DEFAULT && next(function.name(), false).is_some() {
        return pass;
    }
    // SAFETY: what the program asked, of a handle, for which it does not matter who asks.
    let ask = |handle| real.and_then(|real| NonNull::new(unsafe { real(handle, name) }));
    let found = if handle == libc::RTLD_DEFAULT { ask(nothing()) } else { ask(handle) };
    // A search of everything finds this library first, even where there is no driver behind it.
    let is_alone = |found| is_ours(found) && next(function.name(), false).is_none();
    let found = if found.is_some_and(is_alone) { ask(nothing()) } else { found };
    let answer = found.map_or(ptr::null_mut(), |found| wrap::wrapped(function, found).as_ptr());
    Reply { answer, go_on: ptr::null_mut() }
}

/// Whether an address is in this library. (Addresses of functions cannot be compared for that: the
/// compiler may have one function under several addresses.)
pub(crate) fn is_ours(address: NonNull<c_void>) -> bool {
    static HERE: u8 = 0;
    let base = |address: *const c_void| {
        let mut about = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: any address may be asked about; the call writes one description, for which zeros
        // are valid too.
        unsafe {
            libc::dladdr(address, about.as_mut_ptr());
            about.assume_init().dli_fbase
        }
    };
    base(address.as_ptr()) == base((&raw const HERE).cast())
}

/// A library without any of the driver's functions: asking it leaves the right error for
/// `dlerror`.
fn nothing() -> *mut c_void {
    // SAFETY: the C library is loaded, and has been initialised.
    unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }
}

/// The `dlsym` that the program would have without this library.
fn real_dlsym() -> Option<Dlsym> {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let mut real = REAL.load(Ordering::Relaxed);
    for version in VERSIONS {
        if real.is_null() {
            // SAFETY: both names end with a zero.
            real = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
            REAL.store(real, Ordering::Relaxed);
        }
    }
    // SAFETY: null, or a function of this type. (A null pointer is `None` of a function pointer.)
    unsafe { std::mem::transmute::<*mut c_void, Option<Dlsym>>(real) }
}

/// The function that the program would have called without this library, if it was linked with the
/// driver: the next one in the order of search, or that of the driver's library, which is loaded
/// for it on demand.
pub(crate) fn next(name: &CStr, load: bool) -> Option<NonNull<c_void>> {
    // SAFETY: the name ends with a zero. The result is used below, so this is not a tail call, and
    // the real function sees that this library asks.
    let found = real_dlsym().map(|real| unsafe { real(libc::RTLD_NEXT, name.as_ptr()) });
    found.and_then(NonNull::new).or_else(|| in_driver(name, load))
}

/// A function of the driver's library. It is loaded if `load` says so, else only looked for.
pub(crate) fn in_driver(name: &CStr, load: bool) -> Option<NonNull<c_void>> {
    let open = |flags: c_int| {
        // SAFETY: the name ends with a zero. If this loads the library, it is the CUDA driver,
        // whose initialisers every CUDA program runs. It is never closed, so that what is found in
        // it stays valid.
        NonNull::new(unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | flags) })
    };
    let loaded = open(libc::RTLD_NOLOAD);
    let driver = loaded.or_else(|| if load { open(0) } else { None })?;
    // SAFETY: the name ends with a zero, the handle is open.
    real_dlsym().and_then(|real| NonNull::new(unsafe { real(driver.as_ptr(), name.as_ptr()) }))
}
