//! Occupancy: how much of the cluster is allocated, counted once however many tenants share it.

use crate::idx::{GpuIdx, IdxVec};
use crate::knobs::Knobs;

/// What the tenants of one GPU hold of it.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    promised_permille: u32,
    /// Tenants with SM share 0: nothing is guaranteed, and they may use the whole GPU.
    unconfined: u32,
}

impl Held {
    fn permille(self) -> u64 {
        if self.unconfined > 0 { 1000 } else { u64::from(self.promised_permille.min(1000)) }
    }
}

/// The allocated part of each GPU.
#[derive(Clone, Debug, Default)]
pub struct Occupancy {
    gpus: IdxVec<GpuIdx, Held>,
    permille: u64,
}

impl Occupancy {
    /// GPUs held, in thousandths of a GPU.
    pub fn permille(&self) -> u64 {
        self.permille
    }

    /// Adds a job on these GPUs with these knobs.
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

    /// Removes a job that was added with these GPUs and knobs.
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
