//! Tenants disturb each other as far as they want more than there is.
//!
//! ```text
//! gpu  = 1 / (1 + 0.36 · max(0, Σ sm − 1) + 0.12 · max(0, Σ dram − 0.2))   within [0.45, 1]
//! part = 1 − d + d · min(1, capacity / Σ demand)                           for bus and CPU each
//! speed = gpu · part(bus) · part(CPU)
//! ```
//!
//! The GPU's part is a published fit over pairs of training jobs. Bus and CPU are shared in equal parts
//! of what each asks for; `d`, a tenant's own demand as a share of the capacity, is the part of its step
//! that waits for them.

use crate::idx::{Idx, JobIdx};
use crate::interference::{Estimate, Interference, Truth};
use crate::knobs::Knobs;
use crate::state::State;

/// What a profile asks of a GPU and its host when it runs alone.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// Share of the multiprocessors.
    pub sm: f64,
    /// Share of the memory bandwidth.
    pub dram: f64,
    /// Bus, MiB/s.
    pub pcie_mib_s: f64,
    /// CPU cores.
    pub cpu_cores: f64,
}

/// Slow-down by how much tenants ask for together.
#[derive(Clone, Debug, PartialEq)]
pub struct Utilization {
    /// Demand of each profile, by its index; those beyond the end ask for nothing.
    pub demands: Vec<Demand>,
    /// Loss per whole GPU that is asked for beyond the first.
    pub sm_loss: f64,
    /// Loss per whole bandwidth that is asked for beyond [`Self::dram_free`].
    pub dram_loss: f64,
    /// Bandwidth that can be asked for without loss.
    pub dram_free: f64,
    /// Nobody becomes slower than this on the GPU itself.
    pub slowest: f64,
    /// What the bus carries, MiB/s.
    pub pcie_mib_s: f64,
    /// Cores for the tenants of one GPU.
    pub cpu_cores: f64,
}

impl Utilization {
    /// The published fit; a bus of 16 lanes of the fourth generation, and as many cores as an eighth of a common node.
    pub fn new(demands: Vec<Demand>) -> Self {
        Self {
            demands,
            sm_loss: 0.36,
            dram_loss: 0.12,
            dram_free: 0.2,
            slowest: 0.45,
            pcie_mib_s: 25_000.0,
            cpu_cores: 12.0,
        }
    }

    /// Speed of one of these tenants.
    pub fn speed_of(&self, demands: &[Demand], who: usize) -> f64 {
        if demands.len() < 2 {
            return 1.0;
        }
        let sum = |of: fn(&Demand) -> f64| demands.iter().map(of).sum::<f64>();
        let sm = (sum(|d| d.sm) - 1.0).max(0.0);
        let dram = (sum(|d| d.dram) - self.dram_free).max(0.0);
        let gpu = 1.0 / (1.0 + self.sm_loss * sm + self.dram_loss * dram);
        let own = &demands[who];
        gpu.clamp(self.slowest, 1.0)
            * part(own.pcie_mib_s, sum(|d| d.pcie_mib_s), self.pcie_mib_s)
            * part(own.cpu_cores, sum(|d| d.cpu_cores), self.cpu_cores)
    }
}

/// What is left of a tenant's speed when all together ask for `sum` of `capacity`.
fn part(own: f64, sum: f64, capacity: f64) -> f64 {
    if sum <= capacity {
        return 1.0;
    }
    let waits = (own / capacity).clamp(0.0, 1.0);
    1.0 - waits + waits * capacity / sum
}

impl Truth for Utilization {}

impl Interference for Utilization {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], who: usize) -> Estimate {
        let demand = |job: JobIdx| {
            let profile = state.spec(job).profile.usize();
            self.demands.get(profile).copied().unwrap_or_default()
        };
        let demands: Vec<Demand> = tenants.iter().map(|(job, _)| demand(*job)).collect();
        Estimate::certain(self.speed_of(&demands, who))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idx::ProfileIdx;
    use crate::interference::testing::{state, whole};
    use crate::math::rng::Rng;

    #[test]
    fn the_published_formula() {
        let demand = |sm, dram| Demand { sm, dram, ..Demand::default() };
        let model = Utilization::new(vec![demand(0.9, 0.3), demand(0.6, 0.2)]);
        let state = state(&[0, 1, 7].map(ProfileIdx));
        let speed = |tenants: &[u32], who| model.speed(&state, 0, &whole(tenants), who).mean;
        assert!((speed(&[0, 1], 0) - 1.0 / (1.0 + 0.36 * 0.5 + 0.12 * 0.3)).abs() < 1e-12);
        assert_eq!(speed(&[0], 0), 1.0);
        // The third is not known, and asks for nothing.
        assert_eq!(speed(&[1, 2], 0), 1.0);
        let full = [demand(1.0, 1.0); 4];
        assert_eq!(Utilization::new(Vec::new()).speed_of(&full, 0), 0.45);
    }

    #[test]
    fn bus_and_cpu_are_shared_once_they_are_short() {
        let model = Utilization { cpu_cores: 4.0, ..Utilization::new(Vec::new()) };
        let cpu = |cpu_cores| Demand { cpu_cores, ..Demand::default() };
        assert_eq!(model.speed_of(&[cpu(2.0), cpu(2.0)], 0), 1.0);
        assert_eq!(model.speed_of(&[cpu(4.0), cpu(4.0)], 0), 0.5);
        let small = model.speed_of(&[cpu(0.4), cpu(8.0)], 0);
        assert!(small > 0.9 && small < 1.0, "{small}");
    }

    #[test]
    fn more_demand_never_helps() {
        let model = Utilization { cpu_cores: 2.0, ..Utilization::new(Vec::new()) };
        let mut rng = Rng::new(4);
        for _ in 0..1_000 {
            let mut demand = || Demand {
                sm: rng.unit(),
                dram: rng.unit(),
                pcie_mib_s: 30_000.0 * rng.unit(),
                cpu_cores: 4.0 * rng.unit(),
            };
            let four = [demand(), demand(), demand(), demand()];
            let speeds: Vec<f64> = (1..=4).map(|n| model.speed_of(&four[..n], 0)).collect();
            assert!(speeds.is_sorted_by(|a, b| a >= b) && speeds[3] > 0.0, "{speeds:?}");
        }
    }
}
