//! Another part: when it is needed, and how it begins.

use crate::constraint::Constraint;
use crate::world::part::{Classes, Part};
use crate::world::{GATHER, KnownNode, Shape, World};
use roommate_core::event::Event;
use roommate_core::time::Time;

/// Takes a fact out of those that the engine was not told yet; whether it was there.
fn forget(facts: &mut Vec<Event>, fact: &Event) -> bool {
    let at = facts.iter().position(|f| f == fact);
    at.map(|at| facts.remove(at)).is_some()
}

impl World {
    /// Begins another part at this time, or earlier if that was wanted before.
    pub(super) fn want_part(&mut self, at: Time, why: &str) {
        if self.new_part.as_ref().is_none_or(|(earlier, _)| *earlier > at) {
            self.new_part = Some((at, why.into()));
        }
    }

    /// A node was observed: the part knows it, or another part is needed.
    pub(super) fn fit_node(&mut self, name: &str, was_up: bool, selected_anew: bool) {
        let Some(known) = self.nodes.get(name) else { return };
        let (shape, up) = (known.shape.clone(), known.up);
        let here = self.part.as_ref().and_then(|p| p.node(name));
        let Some(idx) = here else {
            if shape.is_some_and(|s| s.is_usable()) {
                self.count_foreign_of(name);
                self.want_part(self.now + GATHER, "there are other nodes");
            }
            return;
        };
        let part = self.part.as_ref().expect("the node is in it");
        let of = part.nodes[idx.0 as usize].shape.clone();
        let alike = shape.as_ref().is_none_or(|s| s.has_gpus_of(&of));
        if !alike || (selected_anew && !self.keeps_class(name)) {
            self.want_part(self.now + GATHER, "a node has changed");
        }
        if shape.is_some_and(|s| (s.cpu_milli, s.host_mib) != (of.cpu_milli, of.host_mib)) {
            self.rooms.insert(name.into());
        }
        // The engine is told first of nodes that are up: of two changes that it was not told yet it
        // hears none.
        if was_up && !up {
            if !forget(&mut self.ups, &Event::NodeUp(idx)) {
                self.downs.push(Event::NodeDown(idx));
            }
            self.lose(name);
        } else if !was_up && up {
            if !forget(&mut self.downs, &Event::NodeDown(idx)) {
                self.ups.push(Event::NodeUp(idx));
            }
            self.look_at_works(name);
        }
    }

    /// Whether the node is still allowed to the pods to which others of its class are.
    fn keeps_class(&self, name: &str) -> bool {
        let (Some(part), Some(known)) = (&self.part, self.nodes.get(name)) else { return false };
        let Some(shape) = &known.shape else { return true };
        let one = Classes::of(std::iter::once((&known.node, shape)), part.classes.constraints());
        part.classes.class_of(name).is_some_and(|class| part.classes.is_like(class, &one))
    }

    /// The jobs on a node that is lost leave it before it goes.
    fn lose(&mut self, name: &str) {
        for (w, work) in self.works.iter_mut().enumerate() {
            let Some(work) = work else { continue };
            if work.job.is_some() && work.slots.iter().any(|s| s.node == name) {
                work.lost = true;
                self.dirty.insert(w as u32);
            }
        }
    }

    /// Pods on a node that is back may run there as before.
    fn look_at_works(&mut self, name: &str) {
        for (w, work) in self.works.iter().enumerate() {
            let Some(work) = work else { continue };
            let here = |uid: &String| self.pods.get(uid).and_then(|k| k.node()) == Some(name);
            if work.pods.iter().any(here) {
                self.dirty.insert(w as u32);
            }
        }
    }

    /// What pods that are not ours need of a node that was not known when they were observed.
    fn count_foreign_of(&mut self, name: &str) {
        let on = |pod: &crate::objects::Pod| pod.spec.node_name.as_deref() == Some(name);
        let theirs = self
            .pods
            .values()
            .filter(|k| on(&k.pod) && !k.pod.has_ended() && !matches!(k.request, Some(Ok(_))));
        let needs = theirs.map(|k| k.pod.room());
        let sum = needs.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        if let Some(known) = self.nodes.get_mut(name) {
            known.foreign = sum;
        }
    }

    /// Begins another part: the nodes as they are, and everything where it is.
    pub(super) fn rebuild(&mut self, _why: &str) {
        // A class without a GPU would be one that the engine does not count.
        let usable = |n: &'_ KnownNode| n.shape.as_ref().is_some_and(Shape::is_usable);
        let offered = || {
            let all = self.nodes.values().filter(|n| usable(n));
            all.filter_map(|n| Some((&n.node, n.shape.as_ref()?)))
        };
        let mut constraints = vec![Constraint::default()];
        for work in self.works.iter().flatten().filter(|w| !w.over) {
            if let Some(request) = &work.request
                && !constraints.contains(&request.constraint)
            {
                constraints.push(request.constraint.clone());
            }
        }
        let classes = Classes::of(offered(), constraints);
        let nodes: Vec<_> = offered().map(|(n, s)| (n.name().to_string(), s.clone())).collect();
        self.part = None;
        if !nodes.is_empty() {
            // The policy was built before with the same parameters.
            self.part = Part::begin(&self.settings, nodes, classes).ok();
            self.counts.parts += 1;
        }
        self.ups.clear();
        self.downs.clear();
        self.rooms.clear();
        if let Some(part) = &self.part {
            for (i, node) in part.nodes.iter().enumerate() {
                let known = self.nodes.get(&node.name);
                if known.is_none_or(|n| !n.up) {
                    self.downs.push(Event::NodeDown(roommate_core::idx::NodeIdx(i as u32)));
                }
                self.rooms.insert(node.name.clone());
            }
        }
        for (w, work) in self.works.iter_mut().enumerate() {
            if let Some(work) = work {
                work.job = None;
                (work.lost, work.bounced) = (false, false);
                self.dirty.insert(w as u32);
            }
        }
    }
}
