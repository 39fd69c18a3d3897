//! The GPUs of this machine according to NVML, the driver's library.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::ComputeMode;
use nvml_wrapper::error::NvmlError;
use std::ffi::{OsStr, OsString};

/// A GPU of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GpuInfo {
    /// Its NVML index, by PCI bus order.
    pub(crate) index: u32,
    /// Its permanent identifier, by which processes are assigned to it independently of indices.
    pub(crate) uuid: String,
    pub(crate) name: String,
    /// The GPU model in cluster notation, for example `h200`.
    pub(crate) model: String,
    /// Number of SMs.
    pub(crate) sms: u16,
    pub(crate) mem_mib: u32,
    /// Version of the driver.
    pub(crate) driver: String,
    /// Newest version of CUDA that the driver supports.
    pub(crate) cuda: String,
    /// Whether it is divided into MIG instances; then it is not shared by other means.
    pub(crate) mig: bool,
    /// Whether it supports GPM counters.
    pub(crate) gpm: bool,
    /// Whether any number of processes may use it.
    pub(crate) default_compute_mode: bool,
}

#[cfg(test)]
impl GpuInfo {
    /// A GPU of a twin.
    pub(crate) fn twin(index: u16) -> Self {
        Self {
            index: index.into(),
            uuid: format!("GPU-{index}"),
            name: "twin".into(),
            model: "h200".into(),
            sms: 132,
            mem_mib: 140_000,
            driver: "1".into(),
            cuda: "13.0".into(),
            mig: false,
            gpm: false,
            default_compute_mode: true,
        }
    }
}

/// Selects another library instead of the driver's, for tests.
pub(super) const LIBRARY_VARIABLE: &str = "ROOMMATE_NVML_LIBRARY";
/// The name without a version exists only where CUDA development files are installed.
const LIBRARY: &str = "libnvidia-ml.so.1";

const WHAT_TO_DO: &str =
    "install NVIDIA's driver, or run without GPUs (the cores of this machine as devices)";

/// The library to load.
pub(super) fn library() -> OsString {
    std::env::var_os(LIBRARY_VARIABLE)
        .filter(|v| !v.is_empty())
        .unwrap_or_else(|| OsString::from(LIBRARY))
}

/// The GPUs that this process may use: all, or those in `CUDA_VISIBLE_DEVICES`.
pub(crate) fn inventory() -> Result<Vec<GpuInfo>, String> {
    inventory_of(&library(), std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
}

pub(super) fn inventory_of(library: &OsStr, visible: Option<&str>) -> Result<Vec<GpuInfo>, String> {
    let nvml = open(library)?;
    let failed = |what: &str, e: &NvmlError| format!("could not {what}: {e}; {WHAT_TO_DO}");
    let count = nvml.device_count().map_err(|e| failed("count the GPUs", &e))?;
    let driver = nvml.sys_driver_version().unwrap_or_else(|_| "unknown".into());
    let cuda = nvml
        .sys_cuda_driver_version()
        .map_or_else(|_| "unknown".into(), |v| format!("{}.{}", v / 1000, v % 1000 / 10));
    let mut all = Vec::new();
    for index in 0..count {
        let found = look(&nvml, index, &driver, &cuda);
        all.push(found.map_err(|e| failed(&format!("look at GPU {index}"), &e))?);
    }
    if all.is_empty() {
        return Err(format!("the driver is installed, but it sees no GPU; {WHAT_TO_DO}"));
    }
    let Some(visible) = visible else { return Ok(all) };
    let chosen = choose(&all, visible);
    if chosen.is_empty() {
        return Err(format!(
            "CUDA_VISIBLE_DEVICES is {visible:?}, which leaves none of the {count} GPUs; \
             unset it, or name GPUs by number or UUID"
        ));
    }
    Ok(chosen)
}

/// Whether this program is the static one, without a dynamic linker.
const IS_STATIC: bool = cfg!(all(target_env = "musl", target_feature = "crt-static"));

/// Loads and initialises the library.
pub(super) fn open(library: &OsStr) -> Result<Nvml, String> {
    if IS_STATIC {
        let what = "this is the static program, which can load no driver; for GPUs install the \
                    wheel, the Debian package or the archive whose name ends in -gnu, or run \
                    without GPUs (the cores of this machine as devices)";
        return Err(what.into());
    }
    Nvml::builder().lib_path(library).init().map_err(|e| match e {
        NvmlError::LibloadingError(e) => format!("no NVIDIA driver was found ({e}); {WHAT_TO_DO}"),
        NvmlError::DriverNotLoaded => format!(
            "NVIDIA's library is installed, but its kernel module is not loaded; load it, \
             {WHAT_TO_DO}"
        ),
        e => format!("NVIDIA's library cannot be initialised: {e}; {WHAT_TO_DO}"),
    })
}

fn look(nvml: &Nvml, index: u32, driver: &str, cuda: &str) -> Result<GpuInfo, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let name = device.name()?;
    let at = device.cuda_compute_capability()?;
    let sms = device.num_cores()? / cores_per_sm(at.major, at.minor);
    Ok(GpuInfo {
        index,
        uuid: device.uuid()?,
        model: model(&name),
        name,
        sms: u16::try_from(sms).unwrap_or(u16::MAX),
        mem_mib: mib(device.memory_info()?.total),
        driver: driver.into(),
        cuda: cuda.into(),
        // A GPU that does not know a feature does not use it.
        mig: device.mig_mode().is_ok_and(|m| m.current != 0),
        gpm: device.gpm_support().unwrap_or(false),
        default_compute_mode: matches!(device.compute_mode(), Ok(ComputeMode::Default)),
    })
}

pub(super) fn mib(bytes: u64) -> u32 {
    u32::try_from(bytes >> 20).unwrap_or(u32::MAX)
}

/// NVML reports cores only; the cores per SM depend on the architecture.
fn cores_per_sm(major: i32, minor: i32) -> u32 {
    match (major, minor) {
        (3, _) => 192,
        (6 | 8, 0) | (7, _) => 64,
        _ => 128,
    }
}

/// The GPU model of a product name, for example `a100` for `NVIDIA A100-SXM4-80GB`.
fn model(name: &str) -> String {
    let lower = name.to_ascii_lowercase();
    let brand = |w: &&str| !matches!(*w, "nvidia" | "tesla" | "geforce" | "quadro");
    let mut words = lower.split_whitespace().filter(brand);
    let first = words.next().unwrap_or("gpu");
    // A series is not a model: the following words are included, except generic ones.
    let whole = if matches!(first, "rtx" | "gtx" | "titan") {
        let rest = words.filter(|w| !matches!(*w, "generation" | "gpu" | "laptop"));
        std::iter::once(first).chain(rest).collect()
    } else {
        first.split('-').next().unwrap_or(first).to_string()
    };
    let kept: String = whole.chars().filter(char::is_ascii_alphanumeric).collect();
    if kept.is_empty() { "gpu".into() } else { kept }
}

/// The GPUs of a list as CUDA interprets it: indices or prefixes of UUIDs, up to the first invalid
/// entry. Indices are NVML's; CUDA's are the same if all GPUs have the same model.
fn choose(all: &[GpuInfo], visible: &str) -> Vec<GpuInfo> {
    let mut chosen: Vec<GpuInfo> = Vec::new();
    for word in visible.split(',').map(str::trim) {
        let found = match word.parse::<u32>() {
            Ok(index) => all.iter().find(|g| g.index == index),
            Err(_) => all.iter().find(|g| word.starts_with("GPU-") && g.uuid.starts_with(word)),
        };
        match found {
            Some(gpu) if !chosen.contains(gpu) => chosen.push(gpu.clone()),
            _ => break,
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::super::fake::Nvml as Fake;
    use super::*;

    #[test]
    fn products_have_gpu_models() {
        let of = |name, expect| assert_eq!(model(name), expect, "{name}");
        of("NVIDIA H200", "h200");
        of("NVIDIA H100 80GB HBM3", "h100");
        of("NVIDIA A100-SXM4-80GB", "a100");
        of("Tesla V100-SXM2-16GB", "v100");
        of("Tesla T4", "t4");
        of("NVIDIA L40S", "l40s");
        of("NVIDIA GH200 480GB", "gh200");
        of("NVIDIA GeForce RTX 4090", "rtx4090");
        of("NVIDIA RTX 6000 Ada Generation", "rtx6000ada");
        of("NVIDIA RTX A6000", "rtxa6000");
        of("NVIDIA", "gpu");
    }

    #[test]
    fn the_inventory_describes_every_gpu() {
        let fake = Fake::new();
        let found = inventory_of(&fake.library, None).unwrap();
        let first = super::super::fake::gpu();
        let second = GpuInfo {
            index: 1,
            uuid: "GPU-00000001-fa4e-0000-0000-000000000001".into(),
            name: "NVIDIA A100-SXM4-80GB".into(),
            model: "a100".into(),
            sms: 108,
            mem_mib: 81_920,
            gpm: false,
            ..first.clone()
        };
        assert_eq!(found, [first, second]);
        fake.state("0 mig 1\n1 mode 3\n");
        let found = inventory_of(&fake.library, None).unwrap();
        assert_eq!((found[0].mig, found[1].mig), (true, false));
        assert_eq!((found[0].default_compute_mode, found[1].default_compute_mode), (true, false));
    }

    #[test]
    fn cuda_visible_devices_selects_gpus() {
        let fake = Fake::new();
        let of = |visible: &str| {
            let found = inventory_of(&fake.library, Some(visible));
            found.map(|f| f.iter().map(|g| g.index).collect::<Vec<_>>())
        };
        assert_eq!(of("1"), Ok(vec![1]));
        assert_eq!(of("1, 0"), Ok(vec![1, 0]));
        assert_eq!(of("GPU-00000001"), Ok(vec![1]));
        assert_eq!(of("0,-1,1"), Ok(vec![0]));
        assert_eq!(of("0,0,1"), Ok(vec![0]));
        let error = of("").unwrap_err();
        assert!(error.contains("leaves none of the 2 GPUs; unset it"), "{error}");
    }

    #[test]
    fn errors_say_what_to_do() {
        let error = inventory_of(OsStr::new("libno-such.so.1"), None).unwrap_err();
        assert!(error.starts_with("no NVIDIA driver was found (") && error.contains("libno-such"));
        assert!(error.ends_with(WHAT_TO_DO), "{error}");
        let fake = Fake::new();
        fake.state("count 0\n");
        let error = inventory_of(&fake.library, None).unwrap_err();
        assert!(
            error.starts_with("the driver is installed, but it sees no GPU; install"),
            "{error}"
        );
        fake.state("fail init\n");
        let error = inventory_of(&fake.library, None).unwrap_err();
        assert!(error.contains("its kernel module is not loaded; load it, install"), "{error}");
        fake.state("fail name\n");
        let error = inventory_of(&fake.library, None).unwrap_err();
        assert!(error.starts_with("could not look at GPU 0: "), "{error}");
    }
}
