//! Counts the gangs that would fit on an empty cluster by first fit, without placing them.

use crate::state::State;
use smallvec::SmallVec;

/// The number of idle GPUs of each node of a hypothetical cluster.
#[derive(Clone, Debug)]
pub(crate) struct FirstFitSketch {
    /// Idle GPUs and size of each node that is up.
    nodes: Vec<(u16, u16)>,
    largest: u16,
}

impl FirstFitSketch {
    /// The cluster without any job.
    pub(crate) fn empty(state: &State) -> Self {
        let up = state.nodes.iter().filter(|n| n.up);
        let nodes: Vec<(u16, u16)> = up.map(|n| (n.size, n.size)).collect();
        let largest = nodes.iter().map(|n| n.1).max().unwrap_or(0);
        Self { nodes, largest }
    }

    /// Takes GPUs for a gang, as `Rule::FirstFit` would; if it does not fit, takes none and returns
    /// false.
    pub(crate) fn take(&mut self, gpus: u16) -> bool {
        if gpus <= self.largest {
            let fits = self.nodes.iter_mut().find(|n| n.0 >= gpus);
            return fits.map(|n| n.0 -= gpus).is_some();
        }
        let mut left = gpus;
        let mut taken: SmallVec<[(usize, u16); 8]> = SmallVec::new();
        for (i, (idle, size)) in self.nodes.iter().enumerate() {
            if idle == size && *size <= left {
                taken.push((i, *size));
                left -= size;
            }
        }
        if left > 0 {
            let other = |i: &usize| taken.iter().all(|t| t.0 != *i) && self.nodes[*i].0 >= left;
            let Some(rest) = (0..self.nodes.len()).find(other) else { return false };
            taken.push((rest, left));
        }
        for (i, count) in taken {
            self.nodes[i].0 -= count;
        }
        true
    }
}
