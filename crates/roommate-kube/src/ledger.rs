//! The ledger: what each GPU was given away for, as the API server knows it or will know it once
//! the writes that are under way have arrived. It is kept apart from the engine's own accounts, so
//! that no binding and no change of a share leaves the scheduler that would give a GPU away twice,
//! whatever a policy, a lost answer or another scheduler did.

use crate::assignment::Assignment;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What a pod holds of each of its GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Its node.
    pub node: String,
    /// Its GPUs there.
    pub gpus: Vec<u16>,
    /// Promised part of the multiprocessors, permille.
    pub share_permille: u16,
    /// Memory, MiB.
    pub mem_mib: u32,
}

impl Hold {
    /// What an assignment gives a pod on this node. A pod that stands still with its memory on the
    /// host holds nothing but its place.
    pub fn of(node: &str, assignment: &Assignment) -> Self {
        let knobs = &assignment.knobs;
        let (share_permille, mem_mib) =
            if assignment.suspended { (0, 0) } else { (knobs.sm_permille, knobs.mem_mib) };
        Self { node: node.into(), gpus: assignment.gpus.clone(), share_permille, mem_mib }
    }

    /// Whether any of its GPUs is one of these, which are ascending.
    pub fn is_on_any(&self, numbers: &[u16]) -> bool {
        self.gpus.iter().any(|gpu| numbers.binary_search(gpu).is_ok())
    }
}

/// What the pods on a GPU hold together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Promised parts of the multiprocessors, permille.
    pub share_permille: u32,
    /// Memory, MiB.
    pub mem_mib: u64,
    /// Pods.
    pub pods: u32,
}

/// Limits of the GPUs of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// GPUs.
    pub gpus: u16,
    /// Memory of each, MiB; 0 = not known.
    pub mem_mib: u32,
    /// Most pods on each that are not suspended.
    pub pods: u32,
}

/// What was given away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    nodes: BTreeMap<String, (Limits, Vec<Held>)>,
    holds: HashMap<String, Hold>,
    /// Pods that hold something, by node.
    on: BTreeMap<String, BTreeSet<String>>,
}

impl Ledger {
    /// Sets the limits of a node; what its pods hold stays.
    pub fn set_node(&mut self, node: &str, limits: Limits) {
        let entry = self.nodes.entry(node.into()).or_insert((limits, Vec::new()));
        entry.0 = limits;
        if entry.1.len() < usize::from(limits.gpus) {
            entry.1.resize(usize::from(limits.gpus), Held::default());
        }
    }

    /// Whether the pod may hold this, besides what others hold and instead of what it holds.
    pub fn fits(&self, pod: &str, hold: &Hold) -> bool {
        let Some((limits, held)) = self.nodes.get(&hold.node) else { return false };
        let own = self.holds.get(pod).filter(|own| own.node == hold.node);
        hold.gpus.iter().all(|gpu| {
            let Some(mut all) = held.get(usize::from(*gpu)).copied() else { return false };
            if *gpu >= limits.gpus {
                return false;
            }
            if let Some(own) = own.filter(|own| own.gpus.contains(gpu)) {
                all.remove(own);
            }
            all.add(hold);
            all.share_permille <= 1000
                && (limits.mem_mib == 0 || all.mem_mib <= u64::from(limits.mem_mib))
                && all.pods <= limits.pods
        })
    }

    /// Records what a pod holds now, or nothing.
    pub fn set(&mut self, pod: &str, hold: Option<Hold>) {
        if let Some(old) = self.holds.remove(pod) {
            self.change(&old, Held::remove);
            if let Some(on) = self.on.get_mut(&old.node) {
                on.remove(pod);
            }
        }
        if let Some(new) = hold {
            self.change(&new, Held::add);
            self.on.entry(new.node.clone()).or_default().insert(pod.into());
            self.holds.insert(pod.into(), new);
        }
    }

    /// What a pod holds.
    pub fn of(&self, pod: &str) -> Option<&Hold> {
        self.holds.get(pod)
    }

    /// Pods that hold something on a node.
    pub fn on(&self, node: &str) -> impl Iterator<Item = &String> {
        self.on.get(node).into_iter().flatten()
    }

    /// Number of pods that hold something.
    pub fn pods(&self) -> usize {
        self.holds.len()
    }

    /// What the GPUs of a node are held for.
    pub fn node(&self, node: &str) -> &[Held] {
        self.nodes.get(node).map_or(&[], |(_, held)| held)
    }

    /// GPUs on which more was given away than there is.
    pub fn over(&self) -> usize {
        self.each_over().count()
    }

    /// The first of them, with who holds it.
    pub fn describe_over(&self) -> Option<String> {
        let (node, gpu, limits, held) = self.each_over().next()?;
        let on = |(_, hold): &(&String, &Hold)| hold.node == *node && hold.gpus.contains(&gpu);
        let mut holders: Vec<_> = self.holds.iter().filter(on).collect();
        holders.sort_by_key(|(pod, _)| pod.as_str());
        Some(format!("GPU {gpu} of {node}: {held:?} of {limits:?}, held by {holders:?}"))
    }

    fn each_over(&self) -> impl Iterator<Item = (&String, u16, &Limits, &Held)> {
        let is_over = |gpu: u16, limits: &Limits, held: &Held| {
            held.share_permille > 1000
                || held.pods > limits.pods
                || (held.pods > 0 && gpu >= limits.gpus)
                || (limits.mem_mib > 0 && held.mem_mib > u64::from(limits.mem_mib))
        };
        self.nodes.iter().flat_map(move |(node, (limits, held))| {
            let each = held.iter().enumerate().map(|(i, held)| (i as u16, held));
            let over = each.filter(move |(gpu, held)| is_over(*gpu, limits, held));
            over.map(move |(gpu, held)| (node, gpu, limits, held))
        })
    }

    fn change(&mut self, hold: &Hold, how: impl Fn(&mut Held, &Hold)) {
        let unknown = Limits { gpus: 0, mem_mib: 0, pods: 0 };
        let (_, held) =
            self.nodes.entry(hold.node.clone()).or_insert_with(|| (unknown, Vec::new()));
        for gpu in &hold.gpus {
            let at = usize::from(*gpu);
            if held.len() <= at {
                held.resize(at + 1, Held::default());
            }
            how(&mut held[at], hold);
        }
    }
}

impl Held {
    fn add(&mut self, hold: &Hold) {
        self.share_permille += u32::from(hold.share_permille);
        self.mem_mib += u64::from(hold.mem_mib);
        self.pods += 1;
    }

    fn remove(&mut self, hold: &Hold) {
        self.share_permille -= u32::from(hold.share_permille);
        self.mem_mib -= u64::from(hold.mem_mib);
        self.pods -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(gpus: &[u16], share_permille: u16, mem_mib: u32) -> Hold {
        Hold { node: "a".into(), gpus: gpus.into(), share_permille, mem_mib }
    }

    #[test]
    fn nothing_is_given_away_twice() {
        let mut ledger = Ledger::default();
        assert!(!ledger.fits("x", &hold(&[0], 100, 0)), "the node is not known");
        ledger.set_node("a", Limits { gpus: 2, mem_mib: 1000, pods: 2 });
        assert!(!ledger.fits("x", &hold(&[2], 100, 0)), "there is no third GPU");
        ledger.set("x", Some(hold(&[0, 1], 600, 700)));
        assert!(ledger.fits("y", &hold(&[0], 400, 300)));
        assert!(!ledger.fits("y", &hold(&[0], 401, 300)));
        assert!(!ledger.fits("y", &hold(&[0], 400, 301)));
        // Its own hold is replaced.
        assert!(ledger.fits("x", &hold(&[0], 1000, 1000)));
        ledger.set("y", Some(hold(&[0], 0, 0)));
        assert!(!ledger.fits("z", &hold(&[0], 0, 0)), "two pods are the most");
        ledger.set("x", None);
        assert!(ledger.fits("z", &hold(&[0], 1000, 1000)));
        assert_eq!((ledger.pods(), ledger.over()), (1, 0));
        ledger.set("z", Some(hold(&[0], 1000, 1000)));
        ledger.set("w", Some(hold(&[0], 1, 0)));
        assert_eq!(ledger.over(), 1);
    }
}
