//! The environment of measured tasks, and the counters of their device: cores, or a GPU with its
//! MPS daemon and GPM counters.

use super::plan::{Devices, Plan};
use crate::AgentError;
use crate::device::nvidia::{self, GpuInfo, Mps, NOWHERE, Sampler};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// How often the counters are read: a few times in a short window.
const LOOK_EVERY: Duration = Duration::from_millis(400);

/// Reads the counters of the device during a measurement.
pub trait Counters {
    /// A window begins.
    fn begin(&mut self);
    /// Called repeatedly during the window.
    fn look(&mut self);
    /// The window has ended: the field `gpm` of the row, if known.
    fn end(&mut self) -> Option<Value>;
}

/// A device without counters.
struct Uncounted;

impl Counters for Uncounted {
    fn begin(&mut self) {}
    fn look(&mut self) {}
    fn end(&mut self) -> Option<Value> {
        None
    }
}

/// What tasks run on and how it is observed.
pub struct BenchSetup {
    /// The device, as shown to people.
    pub device: String,
    /// Environment variables of all tasks.
    pub env: BTreeMap<String, String>,
    /// SMs of the device.
    pub sms: u32,
    /// Counters of the device.
    pub counters: Box<dyn Counters>,
    /// Stopped when the setup is dropped, after all its clients have ended.
    _mps: Option<Stops>,
}

struct Stops(Mps);

impl Drop for Stops {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl BenchSetup {
    /// The device that the plan requests, or the one that exists. Files of the MPS daemon go into
    /// this folder.
    pub fn of(plan: &Plan, folder: &Path) -> Result<Self, AgentError> {
        let found = nvidia::inventory();
        let has_gpu = found.as_ref().is_ok_and(|gpus| !gpus.is_empty());
        match plan.devices {
            Some(Devices::Cpu) => Self::of_cores(plan, ""),
            None if !has_gpu => Self::of_cores(plan, "this machine has no GPU, and "),
            Some(Devices::Gpu) | None => {
                let gpus = found.map_err(|e| AgentError::from(plan.wrong(e)))?;
                let none = || AgentError::from(plan.wrong("this machine has no GPU".into()));
                Self::of_gpu(plan, gpus.first().ok_or_else(none)?, folder)
            }
        }
    }

    fn of_cores(plan: &Plan, why: &str) -> Result<Self, AgentError> {
        if plan.splits_anything() {
            let what = "cores have no multiprocessors: leave out `sms` and `splits`";
            return Err(plan.wrong(format!("{why}{what}")).into());
        }
        Ok(Self {
            device: "the cores of this machine".into(),
            env: BTreeMap::new(),
            sms: 1,
            counters: Box::new(Uncounted),
            _mps: None,
        })
    }

    fn of_gpu(plan: &Plan, gpu: &GpuInfo, folder: &Path) -> Result<Self, AgentError> {
        let mut env = BTreeMap::from([("CUDA_VISIBLE_DEVICES".to_string(), gpu.uuid.clone())]);
        let mps = plan.mps.unwrap_or(true).then(|| Stops(Mps::new(folder, gpu)));
        match &mps {
            None => drop(env.insert("CUDA_MPS_PIPE_DIRECTORY".into(), NOWHERE.into())),
            Some(Stops(mps)) => {
                mps.ensure().map_err(|what| {
                    AgentError::refused(what, "`mps: false` in the plan measures without MPS")
                })?;
                env.extend(mps.env().into_iter().map(|(name, value)| (name.to_string(), value)));
            }
        }
        let sms = plan.sms.unwrap_or_else(|| gpu.sms.into());
        let with = if mps.is_some() { "with MPS" } else { "without MPS" };
        Ok(Self {
            device: format!("{} ({sms} SMs, driver {}), {with}", gpu.name, gpu.driver),
            env,
            sms,
            counters: if gpu.gpm { Box::new(Gpm::of(gpu)) } else { Box::new(Uncounted) },
            _mps: mps,
        })
    }
}

/// The counters of a GPU.
struct Gpm {
    sampler: Sampler,
    begun: Instant,
    seen: Vec<(Instant, nvidia::Counters)>,
}

impl Gpm {
    fn of(gpu: &GpuInfo) -> Self {
        let sampler = Sampler::start(std::slice::from_ref(gpu), LOOK_EVERY);
        Self { sampler, begun: Instant::now(), seen: Vec::new() }
    }
}

impl Counters for Gpm {
    fn begin(&mut self) {
        self.begun = Instant::now();
        self.seen.clear();
    }

    fn look(&mut self) {
        let Some(reading) = self.sampler.latest().into_iter().next() else { return };
        let Some(counters) = reading.counters else { return };
        // A reading covers the time since the previous one.
        let within = reading.at >= self.begun + LOOK_EVERY;
        if within && self.seen.last().is_none_or(|(at, _)| *at != reading.at) {
            self.seen.push((reading.at, counters));
        }
    }

    fn end(&mut self) -> Option<Value> {
        self.look();
        if self.seen.is_empty() {
            return None;
        }
        let n = self.seen.len() as f64;
        let mean = |of: fn(&nvidia::Counters) -> f32, times: f64| {
            let sum: f64 = self.seen.iter().map(|(_, c)| f64::from(of(c))).sum();
            (1e4 * times * sum / n).round() / 1e4
        };
        Some(json!({
            "graphics": mean(|c| c.graphics, 100.0),
            "sm_util": mean(|c| c.sm_util, 100.0),
            "sm_occ": mean(|c| c.sm_occ, 100.0),
            "tensor": mean(|c| c.tensor, 100.0),
            "dram": mean(|c| c.dram, 100.0),
            "pcie_tx_mib_s": mean(|c| c.pcie_tx_mib_s, 1.0),
            "pcie_rx_mib_s": mean(|c| c.pcie_rx_mib_s, 1.0),
        }))
    }
}
