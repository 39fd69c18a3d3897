//! CPU and memory of nodes, as their kubelets count them: what pods take that the engine does not
//! place, and what is left to it.

use super::{Known, Shape, World};
use crate::objects::Pod;
use roommate_core::event::Event;
use roommate_core::job::Phase;

impl World {
    /// CPU and memory of a pod that is not ours, on its node.
    pub(super) fn count_foreign(&mut self, known: &Known, here: bool) {
        let ours = matches!(known.request, Some(Ok(_)));
        let Some(node) = known.pod.spec.node_name.clone() else { return };
        if ours || known.pod.has_ended() {
            return;
        }
        let needs = known.pod.room();
        let Some(of) = self.nodes.get_mut(&node) else { return };
        let add = |a: u64, b: u64| if here { a.saturating_add(b) } else { a.saturating_sub(b) };
        of.foreign = (add(of.foreign.0, needs.0), add(of.foreign.1, needs.1));
        self.rooms.insert(node);
    }

    /// What of a node the engine may give away, if that has changed.
    pub(super) fn room_of(&self, name: &str) -> Option<Event> {
        let part = self.part.as_ref()?;
        let node = part.node(name)?;
        let known = self.nodes.get(name)?;
        let shape = known.shape.as_ref()?;
        let apart = self.ledger.on(name).filter_map(|uid| self.pods.get(uid));
        let apart = apart.filter(|pod| self.is_apart(pod, shape)).map(|pod| pod.pod.room());
        let used = apart.fold(known.foreign, |a, b| (a.0 + b.0, a.1 + b.1));
        let left = |all: u32, used: u64| u64::from(all).saturating_sub(used).max(1) as u32;
        let room = (left(shape.cpu_milli, used.0), left(shape.host_mib, used.1));
        let engine = part.engine.state().node(node);
        let (cpu_milli, host_mib) = room;
        let changed = room != (engine.cpu_milli, engine.host_mib);
        changed.then_some(Event::NodeRoom { node, cpu_milli, host_mib })
    }

    /// Whether the kubelet counts what a pod of ours asks for, and the engine does not: it stands
    /// still, or its GPU cannot be used now.
    pub(super) fn is_apart(&self, known: &Known, shape: &Shape) -> bool {
        let ill = known.hold().is_some_and(|hold| hold.is_on_any(&shape.unhealthy));
        let stands_still = || {
            let phase = known.work.and_then(|w| self.phase(w));
            known.now().is_some_and(|assignment| assignment.suspended)
                && !matches!(phase, Some(Phase::Starting | Phase::Running))
        };
        ill || stands_still()
    }

    /// Whether a node has CPU and memory for another pod, as its kubelet counts them.
    pub(super) fn has_room(&self, name: &str, pod: &Pod) -> bool {
        let Some(known) = self.nodes.get(name) else { return false };
        let Some(shape) = &known.shape else { return false };
        let there = self.ledger.on(name).filter_map(|uid| self.pods.get(uid));
        let there = there.filter(|k| k.pod.uid() != pod.uid()).map(|k| k.pod.room());
        let all = there.fold(known.foreign, |a, b| (a.0 + b.0, a.1 + b.1));
        let (cpu, host) = pod.room();
        all.0 + cpu <= u64::from(shape.cpu_milli) && all.1 + host <= u64::from(shape.host_mib)
    }
}
