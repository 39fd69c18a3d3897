//! The calls of the CUDA driver API that the gate makes itself.

use crate::find;
use crate::once::Once;
use std::ffi::{c_int, c_uint, c_void};

/// A result code of the driver.
pub(crate) type Code = c_int;
pub(crate) type Handle = *mut c_void;

pub(crate) const SUCCESS: Code = 0;
/// No driver library was found (`CUDA_ERROR_SHARED_OBJECT_INIT_FAILED`).
pub(crate) const NO_DRIVER: Code = 303;
const NOT_READY: Code = 600;
/// Events without time stamps are cheaper.
const DISABLE_TIMING: c_uint = 2;
/// The thread may make any call while another thread captures.
const RELAXED: c_int = 2;
const NOT_CAPTURING: c_int = 0;

/// A call of ours that the driver refused.
pub(crate) struct Refused;

fn check(code: Code) -> Result<(), Refused> {
    if code == SUCCESS { Ok(()) } else { Err(Refused) }
}

/// Declares the driver functions: the field, the name in the library, the arguments.
macro_rules! driver {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        pub(crate) struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Driver {
            fn load() -> Option<Self> {
                Some(Self { $($field: {
                    let found = find::in_driver($symbol, false)?;
                    // SAFETY: the type is that of the driver API's declaration of this symbol.
                    unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) -> Code,
                        >(found.as_ptr())
                    }
                },)* })
            }
        }
    };
}

driver! {
    cu_current = c"cuCtxGetCurrent" (*mut Handle);
    cu_is_capturing = c"cuStreamIsCapturing" (Handle, *mut c_int);
    cu_exchange_mode = c"cuThreadExchangeStreamCaptureMode" (*mut c_int);
    cu_event_create = c"cuEventCreate" (*mut Handle, c_uint);
    cu_event_record = c"cuEventRecord" (Handle, Handle);
    cu_event_query = c"cuEventQuery" (Handle);
}

static DRIVER: Once<Driver> = Once::new();

/// The driver's functions; `None` if the library is not loaded or lacks one of them.
pub(crate) fn driver() -> Option<&'static Driver> {
    DRIVER.get(Driver::load)
}

pub(crate) fn forget() {
    DRIVER.forget();
}

impl Driver {
    /// The context that is current for this thread.
    pub(crate) fn current(&self) -> Result<Handle, Refused> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        check(unsafe { (self.cu_current)(&raw mut context) })?;
        if context.is_null() { Err(Refused) } else { Ok(context) }
    }

    /// Whether launches on the stream become part of a graph, or might.
    pub(crate) fn may_capture(&self, stream: Handle) -> bool {
        let mut status = NOT_CAPTURING;
        // SAFETY: the program is about to launch on this stream; the driver writes one number. On
        // the legacy stream the call fails, without harm, while another stream captures.
        let code = unsafe { (self.cu_is_capturing)(stream, &raw mut status) };
        code != SUCCESS || status != NOT_CAPTURING
    }

    /// Does something that a capture by another thread would forbid this one.
    pub(crate) fn relaxed<T>(
        &self,
        what: impl FnOnce() -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        let mut mode = RELAXED;
        // SAFETY: the driver reads and writes one number.
        check(unsafe { (self.cu_exchange_mode)(&raw mut mode) })?;
        let done = what();
        // SAFETY: the same; this is the mode that the thread had.
        let restored = check(unsafe { (self.cu_exchange_mode)(&raw mut mode) });
        done.and_then(|value| restored.map(|()| value))
    }

    /// A new event in the current context.
    pub(crate) fn event(&self) -> Result<Handle, Refused> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        check(unsafe { (self.cu_event_create)(&raw mut event, DISABLE_TIMING) })?;
        Ok(event)
    }

    /// Has the event happen when all that was launched on the stream is done.
    pub(crate) fn record(&self, event: Handle, stream: Handle) -> Result<(), Refused> {
        // SAFETY: the event is one of ours and never destroyed; the program just launched on the
        // stream. The driver refuses what does not belong to one context.
        check(unsafe { (self.cu_event_record)(event, stream) })
    }

    pub(crate) fn has_happened(&self, event: Handle) -> Result<bool, Refused> {
        // SAFETY: the event is one of ours and never destroyed.
        match unsafe { (self.cu_event_query)(event) } {
            NOT_READY => Ok(false),
            code => check(code).map(|()| true),
        }
    }
}
