//! Sensitivity: how the speed of a profile depends on its CPU and host memory per GPU.
//!
//! Image and speech training preprocess on the CPU and cache their data in host memory; with too
//! little of either the GPU waits. Language models hardly depend on them.

use crate::idx::JobIdx;
use crate::knobs::Knobs;
use crate::state::{Node, State};
use serde::{Deserialize, Serialize};

/// CPU in thousandths of a core and host memory in MiB, per GPU; 0 = not known.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// CPU in thousandths of a core.
    pub cpu_milli: u32,
    /// Host memory in MiB.
    pub mib: u32,
}

impl Host {
    /// The CPU and host memory in these knobs.
    pub fn of(knobs: Knobs) -> Self {
        Self { cpu_milli: knobs.cpu_milli, mib: knobs.host_mib }
    }

    /// These knobs with this CPU and host memory.
    pub fn on(self, knobs: Knobs) -> Knobs {
        Knobs { cpu_milli: self.cpu_milli, host_mib: self.mib, ..knobs }
    }

    /// The smaller of each.
    pub fn min(self, other: Self) -> Self {
        Self { cpu_milli: self.cpu_milli.min(other.cpu_milli), mib: self.mib.min(other.mib) }
    }

    /// Whether neither exceeds the other's.
    pub fn within(self, other: Self) -> bool {
        self.cpu_milli <= other.cpu_milli && self.mib <= other.mib
    }
}

/// Speeds at the points of a grid, interpolated between them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Grid")]
pub struct Sensitivity {
    /// CPU of the grid points, ascending.
    cpu_milli: Vec<u32>,
    /// Host memory of the grid points, ascending.
    mib: Vec<u32>,
    /// Speeds by CPU, then by memory, relative to the speed with the usual share.
    speed: Vec<f64>,
    /// CPU and host memory with which the profile's step was measured.
    usual: Host,
    /// The smallest CPU and host memory beyond which more is not worth it.
    best: Host,
}

/// A grid as deserialized, before it is checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Grid {
    cpu_milli: Vec<u32>,
    mib: Vec<u32>,
    speed: Vec<f64>,
    usual: Host,
    best: Host,
}

impl TryFrom<Grid> for Sensitivity {
    type Error = &'static str;
    fn try_from(g: Grid) -> Result<Self, Self::Error> {
        let grid = Self::new(g.cpu_milli, g.mib, g.speed, g.usual, Some(g.best));
        grid.ok_or("expected ascending axes above 0 and a speed above 0 for each of their points")
    }
}

impl Sensitivity {
    /// A grid of measured speeds, by CPU, then by memory; `None` if it is invalid: axes that do not
    /// ascend, too few speeds, or speeds that are not above 0.
    pub fn new(
        cpu_milli: Vec<u32>,
        mib: Vec<u32>,
        speed: Vec<f64>,
        usual: Host,
        best: Option<Host>,
    ) -> Option<Self> {
        let is_axis = |a: &[u32]| a.first().is_some_and(|v| *v > 0) && a.is_sorted_by(|x, y| x < y);
        let sane = is_axis(&cpu_milli)
            && is_axis(&mib)
            && speed.len() == cpu_milli.len() * mib.len()
            && speed.iter().all(|s| s.is_finite() && *s > 0.0);
        let mut grid = Self { cpu_milli, mib, speed, usual, best: usual };
        if !sane {
            return None;
        }
        grid.best = best.unwrap_or_else(|| grid.fastest());
        Some(grid)
    }

    /// A grid where only the best share and its speedup were measured: speed grows linearly with
    /// CPU from the usual share to the best, and memory has no effect on speed.
    pub fn of_best(usual: Host, best: Host, speedup: f64) -> Option<Self> {
        let axis = |a: u32, b: u32| if a == b { vec![a] } else { vec![a.min(b), a.max(b)] };
        let (cpu, mib) = (axis(usual.cpu_milli, best.cpu_milli), axis(usual.mib, best.mib));
        let at = |cpu: &u32| if *cpu == best.cpu_milli { speedup } else { 1.0 };
        let speed = cpu.iter().flat_map(|c| std::iter::repeat_n(at(c), mib.len())).collect();
        Self::new(cpu, mib, speed, usual, Some(best))
    }

    /// The least CPU, then the least memory, at which no point is faster.
    fn fastest(&self) -> Host {
        let most = self.speed.iter().copied().fold(0.0, f64::max);
        let first = self.points().find(|(_, speed)| *speed == most);
        first.map_or(self.usual, |(host, _)| host)
    }

    /// The smallest CPU and host memory beyond which more is not worth it.
    pub fn best(&self) -> Host {
        self.best
    }

    /// All points and their speeds, by CPU, then by memory.
    pub fn points(&self) -> impl Iterator<Item = (Host, f64)> + '_ {
        let hosts = self.cpu_milli.iter().flat_map(|cpu_milli| {
            self.mib.iter().map(|mib| Host { cpu_milli: *cpu_milli, mib: *mib })
        });
        hosts.zip(self.speed.iter().copied())
    }

    /// Speed with this CPU and host memory; an unknown value is taken as the usual one.
    pub fn speed(&self, host: Host) -> f64 {
        let known = |v: u32, usual: u32| if v == 0 { usual } else { v };
        self.at(Host {
            cpu_milli: known(host.cpu_milli, self.usual.cpu_milli),
            mib: known(host.mib, self.usual.mib),
        })
    }

    fn at(&self, host: Host) -> f64 {
        let (c, next_c, along_c) = bracket(&self.cpu_milli, host.cpu_milli);
        let (m, next_m, along_m) = bracket(&self.mib, host.mib);
        let width = self.mib.len();
        let row = |c: usize| {
            let (low, high) = (self.speed[c * width + m], self.speed[c * width + next_m]);
            low + (high - low) * along_m
        };
        let (low, high) = (row(c), row(next_c));
        // Below the first point, half the CPU gives half the speed.
        let starved =
            f64::from(host.cpu_milli.min(self.cpu_milli[0])) / f64::from(self.cpu_milli[0]);
        (low + (high - low) * along_c) * starved
    }
}

/// The grid points around a value, and its position between them.
fn bracket(axis: &[u32], value: u32) -> (usize, usize, f64) {
    let next = axis.partition_point(|a| *a <= value);
    if next == 0 || next == axis.len() {
        let end = next.saturating_sub(1);
        return (end, end, 0.0);
    }
    let (low, high) = (axis[next - 1], axis[next]);
    (next - 1, next, f64::from(value - low) / f64::from(high - low))
}

/// Whether the node's GPUs are of a model that the job may use.
pub fn may_use(state: &State, job: JobIdx, node: &Node) -> bool {
    let mem_mib = state.gpu_models[usize::from(node.gpu_model)].mem_mib;
    let spec = state.spec(job);
    spec.allows(node.gpu_model) && (mem_mib == 0 || spec.knobs.mem_mib <= mem_mib)
}

/// Proportional CPU and host memory per GPU of the smallest node that the job may use; 0 where
/// unknown.
pub fn share(state: &State, job: JobIdx) -> Host {
    let nodes = state.nodes.iter().filter(|n| may_use(state, job, n));
    let each = |n: &Node| Host {
        cpu_milli: n.cpu_milli / u32::from(n.size),
        mib: n.host_mib / u32::from(n.size),
    };
    nodes.map(each).reduce(Host::min).unwrap_or_default()
}

/// The CPU and host memory that the job requests per GPU, at most what fits on a node; the
/// proportional share if it requests none, or if its gang is wider than a node.
pub fn demand(state: &State, job: JobIdx) -> Host {
    let (spec, share) = (state.spec(job), share(state, job));
    let asked = match &state.profile(job).sensitivity {
        Some(known) => known.best(),
        None => Host::of(spec.knobs),
    };
    let gpus = u32::from(spec.gpus);
    let nodes = state.nodes.iter().filter(|n| may_use(state, job, n) && n.size >= spec.gpus);
    let most = nodes.fold(Host::default(), |most, n| Host {
        cpu_milli: most.cpu_milli.max(n.cpu_milli / gpus),
        mib: most.mib.max(n.host_mib / gpus),
    });
    let one = |asked: u32, share: u32, most: u32| match asked {
        0 => share,
        _ if share == 0 => 0,
        _ if most == 0 => asked.min(share),
        _ => asked.min(most),
    };
    let demand = Host {
        cpu_milli: one(asked.cpu_milli, share.cpu_milli, most.cpu_milli),
        mib: one(asked.mib, share.mib, most.mib),
    };
    // On unequal nodes that may still be too much: then the job could never start.
    let knobs = demand.on(spec.knobs);
    let room = |n: &Node| {
        let empty = Node { cpu_used_milli: 0, host_used_mib: 0, ..n.clone() };
        empty.room_for(knobs).min(u32::from(n.size))
    };
    let all: u32 = state.nodes.iter().filter(|n| may_use(state, job, n)).map(room).sum();
    if all >= gpus { demand } else { demand.min(share) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(cores: f64, gib: f64) -> Host {
        Host { cpu_milli: (cores * 1000.0) as u32, mib: (gib * 1024.0) as u32 }
    }

    #[test]
    fn speed_grows_evenly_from_the_usual_share_to_the_best() {
        let alexnet = Sensitivity::of_best(host(3.0, 62.5), host(12.0, 125.0), 2.94).unwrap();
        assert_eq!(alexnet.speed(host(3.0, 62.5)), 1.0);
        assert_eq!(alexnet.speed(host(12.0, 125.0)), 2.94);
        assert_eq!(alexnet.speed(host(24.0, 250.0)), 2.94);
        assert!((alexnet.speed(host(6.0, 125.0)) - 1.646_667).abs() < 1e-6);
        assert_eq!(alexnet.speed(host(1.5, 62.5)), 0.5);
        assert_eq!(alexnet.speed(Host::default()), 1.0, "an unknown value is the usual one");
        let gnmt = Sensitivity::of_best(host(3.0, 62.5), host(1.0, 20.0), 1.0).unwrap();
        assert_eq!(gnmt.speed(host(1.0, 20.0)), 1.0);
        assert_eq!(gnmt.speed(host(3.0, 62.5)), 1.0);
    }

    #[test]
    fn what_is_no_grid_is_refused() {
        let usual = host(1.0, 1.0);
        assert!(Sensitivity::new(vec![], vec![1], vec![], usual, None).is_none());
        assert!(Sensitivity::new(vec![2, 1], vec![1], vec![1.0, 1.0], usual, None).is_none());
        assert!(Sensitivity::new(vec![1], vec![1], vec![0.0], usual, None).is_none());
        assert!(Sensitivity::new(vec![1], vec![1, 2], vec![1.0], usual, None).is_none());
        assert!(Sensitivity::of_best(usual, Host::default(), 1.0).is_none());
    }
}
