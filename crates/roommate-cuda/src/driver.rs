//! The calls of the CUDA driver API that the self-test needs.

use libloading::Library;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::{fmt, ptr};

/// A result code of the driver; 0 is success.
type Code = c_int;
type DeviceId = c_int;
type Address = u64;
type Handle = *mut c_void;

/// A driver call that returned an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    code: Code,
    name: Option<String>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "CUDA error {}", self.code),
        }
    }
}

/// Declares the driver functions: the field, the name in the library, the arguments.
macro_rules! driver {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The loaded driver library and its functions.
        pub(crate) struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> Code,)*
            /// Keeps the functions above valid.
            library: Library,
        }

        impl Driver {
            /// Loads the library.
            pub(crate) fn load(library: &OsStr) -> Result<Self, String> {
                // SAFETY: the library is the CUDA driver (or a test's substitute for it), whose
                // initialisers every CUDA program runs.
                let loaded = unsafe { Library::new(library) };
                let library = loaded.map_err(|e| format!(
                    "could not load the CUDA driver's library: {e}; install NVIDIA's driver, or \
                     do not use the GPUs of this machine"
                ))?;
                $(
                    // SAFETY: the types are those of the driver API's declaration of this symbol.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> Code>($symbol)
                    };
                    let $field = *found.map_err(|e| format!(
                        "the CUDA driver's library is too old or broken: {e}; install a newer \
                         driver"
                    ))?;
                )*
                Ok(Self { $($field,)* library })
            }
        }
    };
}

driver! {
    cu_init = b"cuInit" (c_uint);
    cu_device_get = b"cuDeviceGet" (*mut DeviceId, c_int);
    cu_device_get_attribute = b"cuDeviceGetAttribute" (*mut c_int, c_int, DeviceId);
    cu_primary_retain = b"cuDevicePrimaryCtxRetain" (*mut Handle, DeviceId);
    cu_primary_release = b"cuDevicePrimaryCtxRelease_v2" (DeviceId);
    cu_set_current = b"cuCtxSetCurrent" (Handle);
    cu_synchronize = b"cuCtxSynchronize" ();
    cu_mem_get_info = b"cuMemGetInfo_v2" (*mut usize, *mut usize);
    cu_mem_alloc = b"cuMemAlloc_v2" (*mut Address, usize);
    cu_mem_free = b"cuMemFree_v2" (Address);
    cu_copy_to_host = b"cuMemcpyDtoH_v2" (*mut c_void, Address, usize);
    cu_module_load = b"cuModuleLoadData" (*mut Handle, *const c_void);
    cu_module_unload = b"cuModuleUnload" (Handle);
    cu_module_function = b"cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    cu_launch = b"cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
        *mut *mut c_void, *mut *mut c_void
    );
    cu_error_name = b"cuGetErrorName" (Code, *mut *const c_char);
}

const MULTIPROCESSOR_COUNT: c_int = 16;
/// The resource type of multiprocessors, and the size of a resource description in bytes.
const SM_RESOURCE: c_int = 1;
const RESOURCE_BYTES: usize = 144;

type Resource = [u64; RESOURCE_BYTES / 8];
type GetResource = unsafe extern "C" fn(DeviceId, *mut Resource, c_int) -> Code;
type Split = unsafe extern "C" fn(
    *mut Resource,
    *mut c_uint,
    *const Resource,
    *mut Resource,
    c_uint,
    c_uint,
) -> Code;

impl Driver {
    fn check(&self, code: Code) -> Result<(), Failed> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the driver stores a pointer to a static text, or null for an unknown code.
        let found = unsafe { (self.cu_error_name)(code, &raw mut name) };
        let named = found == 0 && !name.is_null();
        // SAFETY: checked just above; the text ends with a zero and is valid as long as the
        // library.
        let name = named.then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
        Err(Failed { code, name })
    }

    pub(crate) fn init(&self) -> Result<(), Failed> {
        // SAFETY: flags must be 0, and are.
        self.check(unsafe { (self.cu_init)(0) })
    }

    pub(crate) fn device(&self, number: u32) -> Result<DeviceId, Failed> {
        let mut device = 0;
        let number = c_int::try_from(number).unwrap_or(c_int::MAX);
        // SAFETY: the driver writes one number.
        self.check(unsafe { (self.cu_device_get)(&raw mut device, number) })?;
        Ok(device)
    }

    pub(crate) fn multiprocessors(&self, device: DeviceId) -> Result<u32, Failed> {
        let mut count = 0;
        // SAFETY: the driver writes one number.
        let code =
            unsafe { (self.cu_device_get_attribute)(&raw mut count, MULTIPROCESSOR_COUNT, device) };
        self.check(code)?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// The number of groups of at least `each` multiprocessors into which the device can be split
    /// for separate streams; `None` where the driver lacks the functions.
    pub(crate) fn groups(&self, device: DeviceId, sms: u32, each: u32) -> Option<u32> {
        // SAFETY: the types are those of the driver API's declaration of these symbols.
        let get = *unsafe { self.library.get::<GetResource>(b"cuDeviceGetDevResource") }.ok()?;
        // SAFETY: the same.
        let split = *unsafe { self.library.get::<Split>(b"cuDevSmResourceSplitByCount") }.ok()?;
        let (mut whole, mut rest) = ([0; RESOURCE_BYTES / 8], [0; RESOURCE_BYTES / 8]);
        // SAFETY: the driver writes one description.
        self.check(unsafe { get(device, &raw mut whole, SM_RESOURCE) }).ok()?;
        let mut count = sms / each;
        let mut groups = vec![[0; RESOURCE_BYTES / 8]; count as usize];
        // SAFETY: there is room for `count` descriptions and for that of the remainder.
        let code = unsafe {
            split(groups.as_mut_ptr(), &raw mut count, &raw const whole, &raw mut rest, 0, each)
        };
        self.check(code).ok()?;
        Some(count)
    }

    /// The device's primary context, made current for this thread.
    pub(crate) fn context(&self, device: DeviceId) -> Result<Context<'_>, Failed> {
        let mut handle = ptr::null_mut();
        // SAFETY: the driver writes one handle.
        self.check(unsafe { (self.cu_primary_retain)(&raw mut handle, device) })?;
        let context = Context { driver: self, device };
        // SAFETY: the handle came from the driver and is released when `context` is dropped.
        self.check(unsafe { (self.cu_set_current)(handle) })?;
        Ok(context)
    }
}

/// A context on a device, current for the thread that created it.
pub(crate) struct Context<'a> {
    driver: &'a Driver,
    device: DeviceId,
}

/// Device memory, freed when dropped.
pub(crate) struct Memory<'a> {
    driver: &'a Driver,
    address: Address,
}

/// A module, unloaded when dropped.
struct Module<'a> {
    driver: &'a Driver,
    handle: Handle,
}

impl Context<'_> {
    /// Free and total memory in bytes.
    pub(crate) fn memory(&self) -> Result<(u64, u64), Failed> {
        let (mut free, mut total) = (0_usize, 0_usize);
        let driver = self.driver;
        // SAFETY: the driver writes two sizes.
        driver.check(unsafe { (driver.cu_mem_get_info)(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    pub(crate) fn allocate(&self, bytes: u64) -> Result<Memory<'_>, Failed> {
        let mut address = 0;
        let driver = self.driver;
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: the driver writes one address.
        driver.check(unsafe { (driver.cu_mem_alloc)(&raw mut address, bytes) })?;
        Ok(Memory { driver, address })
    }

    /// Runs a kernel that takes an address and a number and writes two numbers for each block.
    pub(crate) fn run(
        &self,
        text: &CStr,
        name: &CStr,
        blocks: u32,
        cycles: u64,
    ) -> Result<Vec<(u32, u32)>, Failed> {
        let driver = self.driver;
        let mut results = vec![[0_u32; 2]; blocks as usize];
        let size = size_of_val(results.as_slice());
        let memory = self.allocate(size as u64)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the text is PTX and ends with a zero; the driver writes one handle.
        driver.check(unsafe { (driver.cu_module_load)(&raw mut handle, text.as_ptr().cast()) })?;
        let module = Module { driver, handle };
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a zero, the driver writes one handle.
        let code =
            unsafe { (driver.cu_module_function)(&raw mut function, module.handle, name.as_ptr()) };
        driver.check(code)?;
        let (mut into, mut stay) = (memory.address, cycles);
        let mut arguments = [(&raw mut into).cast::<c_void>(), (&raw mut stay).cast::<c_void>()];
        // SAFETY: the kernel takes these two arguments, which the driver copies before it returns;
        // it writes 8 bytes for each block, for which memory is allocated.
        let code = unsafe {
            let none = ptr::null_mut();
            let arguments = arguments.as_mut_ptr();
            (driver.cu_launch)(
                function,
                blocks,
                1,
                1,
                32,
                1,
                1,
                0,
                none,
                arguments,
                ptr::null_mut(),
            )
        };
        driver.check(code)?;
        // SAFETY: a context is current.
        driver.check(unsafe { (driver.cu_synchronize)() })?;
        // SAFETY: both sides are `size` bytes long, and any bytes are numbers.
        let code =
            unsafe { (driver.cu_copy_to_host)(results.as_mut_ptr().cast(), memory.address, size) };
        driver.check(code)?;
        Ok(results.into_iter().map(|[sm, figure]| (sm, figure)).collect())
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: retained once, by `context`.
        unsafe { (self.driver.cu_primary_release)(self.device) };
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated once, by `allocate`.
        unsafe { (self.driver.cu_mem_free)(self.address) };
    }
}

impl Drop for Module<'_> {
    fn drop(&mut self) {
        // SAFETY: loaded once, by `run`.
        unsafe { (self.driver.cu_module_unload)(self.handle) };
    }
}
