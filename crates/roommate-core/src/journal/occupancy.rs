//! Occupancy: how much of the cluster is held, counted once however many share it.

use crate::idx::{GpuIdx, IdxVec};
use crate::knobs::Knobs;

/// What the tenants of one GPU hold of it.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    promised_permille: u32,
    /// Tenants that are promised nothing and may use all.
    unconfined: u32,
}

impl Held {
    fn permille(self) -> u64 {
        if self.unconfined > 0 { 1000 } else { u64::from(self.promised_permille.min(1000)) }
    }
}

/// How much of each GPU is held.
#[derive(Clone, Debug, Default)]
pub struct Occupancy {
    gpus: IdxVec<GpuIdx, Held>,
    permille: u64,
}

impl Occupancy {
    /// GPUs held, in thousandths.
    pub fn permille(&self) -> u64 {
        self.permille
    }

    /// A job takes these GPUs.
    pub fn enter(&mut self, gpus: &[GpuIdx], knobs: Knobs) {
        for gpu in gpus {
            self.gpus.grow_for(*gpu, Held::default());
            let held = &mut self.gpus[*gpu];
            let before = held.permille();
            held.promised_permille += u32::from(knobs.sm_permille);
            held.unconfined += u32::from(knobs.sm_permille == 0);
            self.permille += held.permille() - before;
        }
    }

    /// A job that took these GPUs with these knobs leaves them.
    pub fn leave(&mut self, gpus: &[GpuIdx], knobs: Knobs) {
        for gpu in gpus {
            let held = &mut self.gpus[*gpu];
            let before = held.permille();
            held.promised_permille -= u32::from(knobs.sm_permille);
            held.unconfined -= u32::from(knobs.sm_permille == 0);
            self.permille -= before - held.permille();
        }
    }
}
