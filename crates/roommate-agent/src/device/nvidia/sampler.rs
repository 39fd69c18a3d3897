//! Counters, memory and processes of GPUs, sampled periodically by a thread.
//!
//! Counters are GPM's (Hopper and later), as the difference of two samples. The usual utilisation
//! of a GPU only says that some kernel was running, which is not useful here.

use super::nvml::{self, GpuInfo};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
use nvml_wrapper::{Device, Nvml};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// GPU activity between two samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Counters {
    /// Part of the time in which anything ran.
    pub(crate) graphics: f32,
    /// Part of the SMs that were busy, on average.
    pub(crate) sm_util: f32,
    /// Part of the possible warps that were resident, on average.
    pub(crate) sm_occ: f32,
    /// Part of the time in which tensor cores were busy.
    pub(crate) tensor: f32,
    /// Part of the memory bandwidth.
    pub(crate) dram: f32,
    pub(crate) pcie_tx_mib_s: f32,
    pub(crate) pcie_rx_mib_s: f32,
}

/// One sample of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reading {
    /// The GPU's [`GpuInfo::index`].
    pub(crate) gpu: u32,
    /// `None` if the GPU has no counters, and in the first sample.
    pub(crate) counters: Option<Counters>,
    pub(crate) used_mib: u32,
    /// Pids as the driver knows them, and the GPU memory of each in MiB.
    pub(crate) processes: Vec<(u32, u32)>,
    pub(crate) at: Instant,
    /// What could not be read this time; older values are kept for it.
    pub(crate) trouble: Option<String>,
}

/// A thread that samples GPUs until this is dropped.
pub(crate) struct Sampler {
    latest: Arc<Mutex<BTreeMap<u32, Reading>>>,
    order: Vec<u32>,
    /// Dropping it ends the thread.
    stop: Option<mpsc::Sender<()>>,
    ended: mpsc::Receiver<()>,
}

/// In the order of [`Counters::new`].
const METRICS: [GpmMetricId; 7] = [
    GpmMetricId::GraphicsUtil,
    GpmMetricId::SmUtil,
    GpmMetricId::SmOccupancy,
    GpmMetricId::AnyTensorUtil,
    GpmMetricId::DramBwUtil,
    GpmMetricId::PcieTxPerSec,
    GpmMetricId::PcieRxPerSec,
];

/// How long a thread that is in the middle of a driver call is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

impl Sampler {
    /// The default period: it costs less than a percent of a core, and GPM is exact over it.
    pub(crate) const USUAL: Duration = Duration::from_secs(1);

    /// One that never has a sample.
    #[cfg(test)]
    pub(crate) fn twin() -> Self {
        let (_, ended) = mpsc::channel();
        Self { latest: Arc::default(), order: Vec::new(), stop: None, ended }
    }

    /// Whether there is something to sample.
    pub(crate) fn watches(&self) -> bool {
        !self.order.is_empty()
    }

    /// Starts to sample.
    pub(crate) fn start(gpus: &[GpuInfo], period: Duration) -> Self {
        Self::with(nvml::library(), gpus, period)
    }

    fn with(library: OsString, gpus: &[GpuInfo], period: Duration) -> Self {
        let latest: Arc<Mutex<BTreeMap<u32, Reading>>> = Arc::default();
        let (stop, stopped) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let order = gpus.iter().map(|g| g.index).collect();
        let (into, gpus) = (Arc::clone(&latest), gpus.to_vec());
        std::thread::spawn(move || {
            // Dropped last, so that the end of the channel means that nothing is held any more.
            let _end = end;
            let into = into;
            // Until the driver can be used (again), or the sampler is dropped.
            while let Err(Gone) = watch(&library, &gpus, period, &into, &stopped) {
                if is_stopped(&stopped, period * 10) {
                    return;
                }
            }
        });
        Self { latest, order, stop: Some(stop), ended }
    }

    /// The latest sample of each GPU, in the order of `gpus`, without GPUs not sampled yet. A GPU
    /// that cannot be read keeps its last sample with its time.
    pub(crate) fn latest(&self) -> Vec<Reading> {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        self.order.iter().filter_map(|index| latest.get(index).cloned()).collect()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop = None;
        let _ = self.ended.recv_timeout(PATIENCE);
    }
}

/// The library cannot be used.
struct Gone;

fn is_stopped(stopped: &mpsc::Receiver<()>, wait: Duration) -> bool {
    !matches!(stopped.recv_timeout(wait), Err(mpsc::RecvTimeoutError::Timeout))
}

fn watch(
    library: &std::ffi::OsStr,
    gpus: &[GpuInfo],
    period: Duration,
    latest: &Mutex<BTreeMap<u32, Reading>>,
    stopped: &mpsc::Receiver<()>,
) -> Result<(), Gone> {
    let nvml = nvml::open(library).map_err(|_| Gone)?;
    let mut before: BTreeMap<u32, GpmSample<'_>> = BTreeMap::new();
    let mut due = Instant::now();
    loop {
        for gpu in gpus {
            // By UUID and anew each time, because a handle is invalid after a GPU was reset.
            let Ok(device) = nvml.device_by_uuid(gpu.uuid.as_str()) else { continue };
            let last =
                latest.lock().unwrap_or_else(PoisonError::into_inner).get(&gpu.index).cloned();
            if let Ok(reading) = look(&nvml, &device, gpu, last, &mut before) {
                latest.lock().unwrap_or_else(PoisonError::into_inner).insert(gpu.index, reading);
            }
        }
        // Periods missed by slow calls are skipped.
        due = (due + period).max(Instant::now());
        if is_stopped(stopped, due.saturating_duration_since(Instant::now())) {
            return Ok(());
        }
    }
}

fn look<'nvml>(
    nvml: &'nvml Nvml,
    device: &Device<'nvml>,
    gpu: &GpuInfo,
    last: Option<Reading>,
    before: &mut BTreeMap<u32, GpmSample<'nvml>>,
) -> Result<Reading, NvmlError> {
    let used_mib = nvml::mib(device.memory_info()?.used);
    let mut trouble = Vec::new();
    let processes = processes(device).unwrap_or_else(|e| {
        trouble.push(format!("processes: {e}"));
        last.map(|l| l.processes).unwrap_or_default()
    });
    let counters = if gpu.gpm { count(nvml, device, gpu.index, before) } else { Ok(None) };
    let counters = counters.unwrap_or_else(|e| {
        trouble.push(format!("counters: {e}"));
        None
    });
    let trouble = (!trouble.is_empty()).then(|| trouble.join("; "));
    Ok(Reading { gpu: gpu.index, counters, used_mib, processes, at: Instant::now(), trouble })
}

/// Processes with their own context and clients of MPS, each once.
fn processes(device: &Device<'_>) -> Result<Vec<(u32, u32)>, NvmlError> {
    let own = device.running_compute_processes()?;
    let clients = device.mps_running_compute_processes().unwrap_or_default();
    let mut all: BTreeMap<u32, u32> = BTreeMap::new();
    for process in own.into_iter().chain(clients) {
        let mib = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => nvml::mib(bytes),
            UsedGpuMemory::Unavailable => 0,
        };
        let most = all.entry(process.pid).or_default();
        *most = mib.max(*most);
    }
    Ok(all.into_iter().collect())
}

/// Counters since the last sample.
fn count<'nvml>(
    nvml: &'nvml Nvml,
    device: &Device<'nvml>,
    index: u32,
    before: &mut BTreeMap<u32, GpmSample<'nvml>>,
) -> Result<Option<Counters>, NvmlError> {
    let now = device.gpm_sample()?;
    let counters = match before.get(&index) {
        Some(last) => Some(Counters::new(gpm_metrics_get(nvml, last, &now, &METRICS)?)?),
        None => None,
    };
    before.insert(index, now);
    Ok(counters)
}

impl Counters {
    fn new(
        metrics: Vec<Result<nvml_wrapper::struct_wrappers::gpm::GpmMetricResult, NvmlError>>,
    ) -> Result<Self, NvmlError> {
        let mut values = metrics.into_iter().map(|m| m.map(|m| m.value));
        let mut next = || values.next().unwrap_or(Err(NvmlError::NoData));
        // Percentages become parts of one; a counter may slightly exceed 100.
        let mut part = || next().map(|v| (v / 100.0).clamp(0.0, 1.0) as f32);
        let (graphics, sm_util, sm_occ) = (part()?, part()?, part()?);
        let (tensor, dram) = (part()?, part()?);
        let (tx, rx) = (next()?, next()?);
        Ok(Self {
            graphics,
            sm_util,
            sm_occ,
            tensor,
            dram,
            pcie_tx_mib_s: tx as f32,
            pcie_rx_mib_s: rx as f32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{Nvml as Fake, until};
    use super::*;

    const PERIOD: Duration = Duration::from_millis(20);

    fn sampler(fake: &Fake) -> Sampler {
        let gpus = nvml::inventory_of(&fake.library, None).unwrap();
        Sampler::with(fake.library.clone(), &gpus, PERIOD)
    }

    #[test]
    fn readings_follow_the_gpus() {
        let fake = Fake::new();
        fake.state(
            "0 used 1500\n0 process 71 1000\n0 process 72 500\n0 sm 80\n0 tx 64\n1 used 7\n",
        );
        let sampler = sampler(&fake);
        let sees = |sm: f32| {
            sampler.latest().first().and_then(|r| r.counters).is_some_and(|c| c.sm_util == sm)
        };
        until("counters", || sees(0.8));
        let [first, second] = &sampler.latest()[..] else { panic!("two GPUs") };
        assert_eq!((first.gpu, first.used_mib), (0, 1500));
        assert_eq!(first.processes, [(71, 1000), (72, 500)]);
        assert_eq!(first.counters.unwrap().pcie_tx_mib_s, 64.0);
        assert_eq!(first.trouble, None);
        // A GPU without counters is read all the same.
        assert_eq!((second.gpu, second.used_mib, second.counters), (1, 7, None));
        assert_eq!(second.trouble, None);
        fake.state("0 used 20\n0 client 73 12\n0 sm 35\n0 dram 250\n");
        until("other counters", || sees(0.35));
        let first = &sampler.latest()[0];
        assert_eq!((first.used_mib, &first.processes[..]), (20, &[(73, 12)][..]));
        assert_eq!(first.counters.unwrap().dram, 1.0, "never above 1");
    }

    #[test]
    fn a_failed_call_keeps_older_values() {
        let fake = Fake::new();
        fake.state("0 used 9\n0 process 71 9\n0 sm 10\n");
        let sampler = sampler(&fake);
        let first = || sampler.latest().into_iter().next();
        until("a reading", || first().is_some_and(|r| r.counters.is_some()));
        fake.state("fail gpm\nfail processes\n0 used 11\n");
        until("what is left", || first().is_some_and(|r| r.used_mib == 11));
        let reading = first().unwrap();
        assert_eq!((reading.counters, &reading.processes[..]), (None, &[(71, 9)][..]));
        let trouble = reading.trouble.unwrap();
        assert!(
            trouble.starts_with("processes: ") && trouble.contains("; counters: "),
            "{trouble}"
        );
        // A GPU that is lost keeps its last sample, with its time.
        fake.state("fail memory\n");
        std::thread::sleep(PERIOD * 2);
        let lost = first().unwrap().at;
        std::thread::sleep(PERIOD * 3);
        assert_eq!(first().unwrap().at, lost);
        fake.state("0 used 12\n0 sm 50\n");
        until("it comes back", || first().is_some_and(|r| r.used_mib == 12 && r.trouble.is_none()));
    }

    #[test]
    fn the_sampler_waits_for_a_driver_and_ends_when_dropped() {
        let fake = Fake::new();
        let gpus = nvml::inventory_of(&fake.library, None).unwrap();
        fake.state("fail init\n");
        let sampler = Sampler::with(fake.library.clone(), &gpus, Duration::from_millis(2));
        std::thread::sleep(Duration::from_millis(50));
        assert!(sampler.latest().is_empty());
        fake.state("0 used 1\n");
        until("a reading", || sampler.latest().len() == 2);
        let held = Arc::downgrade(&sampler.latest);
        let began = Instant::now();
        drop(sampler);
        assert!(began.elapsed() < PATIENCE / 2);
        assert!(held.upgrade().is_none(), "the thread still runs");
    }
}
