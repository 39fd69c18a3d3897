//! Tenants slow each other down where their demand exceeds the capacity.
//!
//! ```text
//! gpu  = 1 / (1 + 0.36 · max(0, Σ sm − 1) + 0.12 · max(0, Σ dram − 0.2))   within [0.45, 1]
//! part = 1 − d + d · min(1, capacity / Σ demand)                           for bus and CPU each
//! speed = gpu · part(bus) · part(CPU)
//! ```
//!
//! The factor of the GPU is a published fit over pairs of training jobs. Bus and CPU are shared in
//! proportion to demand; `d`, a tenant's own demand as a share of the capacity, is the share of its
//! step that waits for them.

use crate::idx::{IdxVec, JobIdx, ProfileIdx};
use crate::interference::{Estimate, Interference, Truth};
use crate::knobs::Knobs;
use crate::state::State;

/// Demand of a profile for a GPU and its host when it runs alone.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// Share of the SMs.
    pub sm: f64,
    /// Share of the memory bandwidth.
    pub dram: f64,
    /// Bus bandwidth, MiB/s.
    pub pcie_mib_s: f64,
    /// CPU cores.
    pub cpu_cores: f64,
}

/// Slowdown by the sum of the tenants' demands.
#[derive(Clone, Debug, PartialEq)]
pub struct Utilization {
    /// Demand of each profile, by profile index; zero beyond the end.
    pub demands: IdxVec<ProfileIdx, Demand>,
    /// Loss per whole GPU of SM demand beyond the first.
    pub sm_loss: f64,
    /// Loss per whole memory bandwidth of demand beyond [`Self::dram_free`].
    pub dram_loss: f64,
    /// Share of the memory bandwidth that can be demanded without loss.
    pub dram_free: f64,
    /// Lower bound on the GPU's factor.
    pub slowest: f64,
    /// Capacity of the bus, MiB/s.
    pub pcie_mib_s: f64,
    /// Cores for the tenants of one GPU.
    pub cpu_cores: f64,
}

impl Utilization {
    /// The published fit; a 16-lane PCI Express 4.0 bus, and an eighth of a common node's cores.
    pub fn new(demands: IdxVec<ProfileIdx, Demand>) -> Self {
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

    /// Speed of tenant `index` among these.
    pub fn speed_of(&self, demands: &[Demand], index: usize) -> f64 {
        if demands.len() < 2 {
            return 1.0;
        }
        let sum = |of: fn(&Demand) -> f64| demands.iter().map(of).sum::<f64>();
        let sm = (sum(|d| d.sm) - 1.0).max(0.0);
        let dram = (sum(|d| d.dram) - self.dram_free).max(0.0);
        let gpu = 1.0 / (1.0 + self.sm_loss * sm + self.dram_loss * dram);
        let own = &demands[index];
        gpu.clamp(self.slowest, 1.0)
            * part(own.pcie_mib_s, sum(|d| d.pcie_mib_s), self.pcie_mib_s)
            * part(own.cpu_cores, sum(|d| d.cpu_cores), self.cpu_cores)
    }
}

/// Factor on a tenant's speed when the demand of all is `sum` of `capacity`.
fn part(own: f64, sum: f64, capacity: f64) -> f64 {
    if sum <= capacity {
        return 1.0;
    }
    let waits = (own / capacity).clamp(0.0, 1.0);
    1.0 - waits + waits * capacity / sum
}

impl Truth for Utilization {}

impl Interference for Utilization {
    fn speed(&self, state: &State, _: u8, tenants: &[(JobIdx, Knobs)], index: usize) -> Estimate {
        let demand = |job: JobIdx| {
            let profile = state.spec(job).profile;
            self.demands.get(profile).copied().unwrap_or_default()
        };
        let demands: Vec<Demand> = tenants.iter().map(|(job, _)| demand(*job)).collect();
        Estimate::certain(self.speed_of(&demands, index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interference::testing::{state, whole};
    use crate::math::rng::Rng;

    #[test]
    fn the_published_formula() {
        let demand = |sm, dram| Demand { sm, dram, ..Demand::default() };
        let model = Utilization::new(vec![demand(0.9, 0.3), demand(0.6, 0.2)].into());
        let state = state(&[0, 1, 7].map(ProfileIdx));
        let speed = |tenants: &[u32], index| model.speed(&state, 0, &whole(tenants), index).mean;
        assert!((speed(&[0, 1], 0) - 1.0 / (1.0 + 0.36 * 0.5 + 0.12 * 0.3)).abs() < 1e-12);
        assert_eq!(speed(&[0], 0), 1.0);
        // The third profile is unknown, so its demand is zero.
        assert_eq!(speed(&[1, 2], 0), 1.0);
        let full = [demand(1.0, 1.0); 4];
        assert_eq!(Utilization::new(IdxVec::new()).speed_of(&full, 0), 0.45);
    }

    #[test]
    fn bus_and_cpu_are_shared_once_they_are_short() {
        let model = Utilization { cpu_cores: 4.0, ..Utilization::new(IdxVec::new()) };
        let cpu = |cpu_cores| Demand { cpu_cores, ..Demand::default() };
        assert_eq!(model.speed_of(&[cpu(2.0), cpu(2.0)], 0), 1.0);
        assert_eq!(model.speed_of(&[cpu(4.0), cpu(4.0)], 0), 0.5);
        let small = model.speed_of(&[cpu(0.4), cpu(8.0)], 0);
        assert!(small > 0.9 && small < 1.0, "{small}");
    }

    #[test]
    fn more_demand_never_helps() {
        let model = Utilization { cpu_cores: 2.0, ..Utilization::new(IdxVec::new()) };
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
