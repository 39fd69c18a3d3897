//! A work's pods, compared with what the engine wants of its job: writes for what is to be done,
//! facts for what was.

use crate::assignment::{Assignment, Gang};
use crate::ledger::Hold;
use crate::names;
use crate::objects::Pod;
use crate::world::part::PartNode;
use crate::world::{
    BACKOFF, EXPLAIN_AFTER, EXPLAIN_EVERY, FORGET_AFTER, Known, Slot, Under, Work, World, Write,
};
use roommate_core::event::{Event, Placement, Sample};
use roommate_core::idx::{GpuIdx, GpuSet, JobIdx};
use roommate_core::job::Phase;
use roommate_core::knobs::Knobs;
use roommate_core::number::{Number, Number32};
use roommate_core::reason::Reason;
use roommate_core::time::Span;
use std::collections::BTreeSet;

/// How long an agent may take to suspend a pod; after that the pod is evicted.
const SUSPENDS_WITHIN: Span = Span(10_000_000);
/// How often it is tried again what another pod forbids.
const REPELLED_FOR: Span = Span(30_000_000);

/// The pods of a work.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    /// That run or can run.
    alive: u32,
    /// Whose processes are on a node, or may be.
    holding: u32,
    /// That ended well.
    done: u32,
    /// That failed.
    failed: u32,
}

impl World {
    /// Makes a pod part of a work.
    pub(super) fn join(&mut self, uid: &str) {
        let Some(known) = self.pods.get(uid) else { return };
        if let Some(work) = known.work {
            self.dirty.insert(work);
            return;
        }
        let request = match &known.request {
            Some(Ok(request)) => request.clone(),
            Some(Err(why)) if known.pod.spec.node_name.is_none() && !known.pod.has_ended() => {
                let explain = Write::Explain { pod: known.named(), why: why.clone() };
                if !known.told_wrong {
                    self.writes.push(explain);
                }
                if let Some(known) = self.pods.get_mut(uid) {
                    known.told_wrong = true;
                }
                return;
            }
            Some(Err(_)) | None => return,
        };
        if known.pod.has_ended() {
            return;
        }
        let gang = gang_of(&known.pod);
        let owner = owner_of(&known.pod);
        let name = format!("{}/{}", known.pod.namespace(), known.pod.name());
        let size = gang.as_ref().map_or(Some(1), |g| self.size_of(g, &known.pod));
        let created = known.pod.metadata.creation_timestamp.as_ref();
        let arrived = (created.map_or(0, |at| at.0.as_second()), self.arrivals);
        let joined = match &gang {
            Some(gang) => self.by_gang.get(gang).copied().filter(|w| self.wants_more(*w)),
            None => owner.as_ref().and_then(|o| self.headless_like(o, &request)),
        };
        let work = joined.unwrap_or_else(|| {
            let first = gang.clone().filter(|g| !self.by_gang.contains_key(g));
            let name =
                first.as_ref().map_or(name, |(namespace, group)| format!("{namespace}/{group}"));
            let work = self.free.pop().unwrap_or(self.works.len() as u32);
            self.arrivals += 1;
            if let Some(gang) = &first {
                self.by_gang.insert(gang.clone(), work);
            }
            // Pods beyond the size of their gang run by themselves.
            let size = if first.is_some() { size } else { Some(1) };
            let new = Some(Work {
                name,
                gang: first,
                owner,
                pods: BTreeSet::new(),
                succeeded: 0,
                // 0 = its PodGroup was not seen yet.
                size: size.unwrap_or(0),
                job: None,
                request: Some(request),
                slots: Vec::new(),
                suspended: false,
                suspend_by: None,
                bounced: false,
                lost: false,
                arrived,
                reclaimed: None,
                not_before: self.now,
                tries: 0,
                since: self.now,
                explained: None,
                over: false,
            });
            match self.works.get_mut(work as usize) {
                Some(free) => *free = new,
                None => self.works.push(new),
            }
            work
        });
        if let Some(Some(of)) = self.works.get_mut(work as usize) {
            of.pods.insert(uid.into());
        }
        if let Some(known) = self.pods.get_mut(uid) {
            known.work = Some(work);
        }
        self.dirty.insert(work);
    }

    /// Pods that a gang needs: as its `PodGroup` or an annotation of its pods says.
    fn size_of(&self, gang: &(String, String), pod: &Pod) -> Option<u16> {
        let said = pod.annotation(names::GROUP_SIZE).and_then(|text| text.parse::<u16>().ok());
        said.or_else(|| self.group_sizes.get(gang).copied()).filter(|n| (1..=4096).contains(n))
    }

    /// Whether a gang has fewer pods than it needs.
    fn wants_more(&self, work: u32) -> bool {
        let Some(Some(of)) = self.works.get(work as usize) else { return false };
        let look = self.look(of);
        of.size == 0 || look.alive + look.done < u32::from(of.size)
    }

    /// The oldest work without pods whose owner makes another pod like those it had.
    fn headless_like(&mut self, owner: &str, request: &crate::request::Request) -> Option<u32> {
        let waiting = self.headless.get_mut(owner)?;
        let works = &self.works;
        let like = |w: &u32| {
            let work = works.get(*w as usize).and_then(Option::as_ref);
            work.is_some_and(|work| work.request.as_ref() == Some(request))
        };
        let at = waiting.iter().position(like)?;
        let work = waiting.remove(at);
        if waiting.is_empty() {
            self.headless.remove(owner);
        }
        Some(work)
    }

    fn look(&self, work: &Work) -> Look {
        let mut look = Look { done: work.succeeded, ..Look::default() };
        for known in work.pods.iter().filter_map(|uid| self.pods.get(uid)) {
            look.alive += u32::from(known.is_alive());
            look.holding += u32::from(known.holds());
            look.done += u32::from(known.pod.phase() == "Succeeded");
            look.failed += u32::from(known.pod.phase() == "Failed");
        }
        look
    }

    /// Does for a work what is to be done now.
    pub(super) fn reconcile(
        &mut self,
        w: u32,
        leaving: &mut Vec<Event>,
        arriving: &mut Vec<Event>,
    ) {
        let phase = self.phase(w);
        let Some(mut work) = self.works.get_mut(w as usize).and_then(Option::take) else { return };
        self.resend(&work);
        if work.size == 0
            && let Some(gang) = &work.gang
        {
            work.size = self.group_sizes.get(gang).copied().unwrap_or(0);
        }
        let look = self.look(&work);
        if work.size > 0 && look.done >= u32::from(work.size) {
            work.finish(phase, leaving);
            self.dismiss(&work);
        } else {
            self.advance(w, &mut work, phase, look, (leaving, arriving));
        }
        let known = work.job.is_some() || work.owner.is_some();
        if work.pods.is_empty() && (work.over || !known || phase == Some(Phase::Done)) {
            self.forget(&work, w);
            return;
        }
        self.works[w as usize] = Some(work);
    }

    fn forget(&mut self, work: &Work, w: u32) {
        self.free.push(w);
        self.dismiss(work);
        if let Some(gang) = &work.gang {
            self.by_gang.remove(gang);
        }
        if let Some(owner) = &work.owner
            && let Some(waiting) = self.headless.get_mut(owner)
        {
            waiting.retain(|other| *other != w);
            if waiting.is_empty() {
                self.headless.remove(owner);
            }
        }
    }

    fn advance(
        &mut self,
        w: u32,
        work: &mut Work,
        phase: Option<Phase>,
        look: Look,
        (leaving, arriving): (&mut Vec<Event>, &mut Vec<Event>),
    ) {
        if work.over {
            return;
        }
        let is_placed = phase.is_some_and(|p| matches!(p, Phase::Starting | Phase::Running));
        if std::mem::take(&mut work.lost) && (is_placed || phase == Some(Phase::Stopping)) {
            leaving.extend(work.job.map(Event::Withdrawn));
            work.since = self.now;
            self.dirty.insert(w);
            return;
        }
        if work.bounced && is_placed {
            self.evict_all(work, "its gang could not be started as a whole");
            if look.holding == 0 {
                work.bounced = false;
                work.since = self.now;
                leaving.extend(work.job.map(Event::Withdrawn));
                self.timers.insert((work.not_before.max(self.now), w));
            }
            return;
        }
        work.bounced = false;
        let decided = |p| !matches!(p, Phase::Expected | Phase::Done);
        if let Some(why) = work.reclaimed.clone().filter(|_| phase.is_some_and(decided)) {
            self.evict_all(work, &why);
            if look.holding == 0 {
                self.give_up(w, work, look, leaving);
            }
            return;
        }
        match phase {
            None | Some(Phase::Expected) => self.arrive(w, work, look, arriving),
            Some(Phase::Pending | Phase::BackingOff) if look.alive < work.needed(look) => {
                self.depart(w, work, look, leaving);
            }
            Some(Phase::Pending | Phase::BackingOff) => {
                if !work.suspended {
                    self.evict_all(work, "it was bound although it waits");
                }
                let why = self.why_it_waits(work);
                self.explain_later(w, work, &why);
            }
            Some(Phase::Starting | Phase::Running) => self.carry_out(w, work, look, leaving),
            Some(Phase::Stopping) => self.vacate(w, work, look, leaving),
            Some(Phase::Done) => {}
        }
    }

    /// A work whose queue has to give back goes into its line again.
    fn give_up(&mut self, w: u32, work: &mut Work, look: Look, leaving: &mut Vec<Event>) {
        self.note_given_back(work);
        work.reclaimed = None;
        if look.alive < work.needed(look) {
            self.depart(w, work, look, leaving);
            return;
        }
        self.dismiss(work);
        work.since = self.now;
        leaving.extend(work.job.map(Event::Withdrawn));
        self.dirty.insert(w);
    }

    /// Submits a work once all its pods are there; one whose pods run already where they are.
    fn arrive(&mut self, w: u32, work: &mut Work, look: Look, arriving: &mut Vec<Event>) {
        if work.size == 0 || look.alive < work.needed(look) {
            // Pods that are about to end count in their queue until they have.
            if look.holding == 0 {
                self.dismiss(work);
            } else {
                self.is_admitted(w, work, true);
            }
            let forgotten = self.now >= work.since + FORGET_AFTER;
            if work.pods.is_empty() && (work.owner.is_none() || forgotten) {
                work.over = true;
            } else if work.gang.is_some() {
                let why = match work.size {
                    0 => "waits for its PodGroup, which says how many pods it has".into(),
                    n => format!(
                        "waits for its gang: {} of {n} pods are there",
                        look.alive + look.done
                    ),
                };
                // A part of a gang may not keep GPUs for nothing.
                self.evict_all(work, "its gang is not complete");
                self.explain_later(w, work, &why);
            }
            return;
        }
        if self.now < work.not_before {
            self.timers.insert((work.not_before, w));
            return;
        }
        let uids: Vec<String> = work.pods.iter().cloned().collect();
        let pods = || uids.iter().filter_map(|uid| self.pods.get(uid));
        if pods().any(Known::is_gated) {
            return;
        }
        if look.holding == 0
            && let Some(why) = pods().find_map(|known| self.repelled(&known.pod))
        {
            self.dismiss(work);
            self.timers.insert((self.now + REPELLED_FOR, w));
            self.explain_later(w, work, &why);
            return;
        }
        if look.holding == 0 && !self.are_alike(work) {
            let why = "pods of its gang ask for different GPUs, nodes, classes or queues: give all \
                       of them the same";
            self.explain_later(w, work, why);
            return;
        }
        if self.part.is_none() {
            let why = format!("no node offers {}", self.settings.resource);
            self.explain_later(w, work, &why);
            return;
        }
        if !self.has_class(work) {
            return;
        }
        if look.holding == 0
            && let Some(why) = self.fits_no_node(work)
        {
            self.explain_later(w, work, &why);
            return;
        }
        if !self.is_admitted(w, work, look.holding > 0) {
            return;
        }
        if look.holding == 0 {
            work.slots.clear();
            if !self.is_registered(work) {
                self.register(w, work, None);
            }
        } else {
            match self.place_of(work) {
                Found::At(on) => self.register(w, work, Some(on)),
                Found::Suspended => self.register(w, work, None),
                // Its node may come back.
                Found::Down => return,
                Found::Nowhere => {
                    self.evict_all(work, "its place is not known");
                    return;
                }
            }
        }
        arriving.extend(work.job.map(Event::Submitted));
        self.dirty.insert(w);
    }

    /// Whether the pods of a work can be one job.
    fn are_alike(&self, work: &Work) -> bool {
        let pods = work.pods.iter().filter_map(|uid| self.pods.get(uid)).filter(|k| k.is_alive());
        let mut asked = pods.filter_map(|known| known.request.as_ref()?.as_ref().ok());
        asked.all(|own| work.request.as_ref().is_some_and(|first| own.fits_a_gang_with(first)))
    }

    /// Why the work can run on no node that there is, if so. Nodes that come later, or change,
    /// begin another part, and then it is looked at anew.
    fn fits_no_node(&self, work: &Work) -> Option<String> {
        let (request, part) = (work.request.as_ref()?, self.part.as_ref()?);
        let mask = part.classes.mask(&request.constraint)?;
        let fits =
            |n: &PartNode| mask >> n.class & 1 == 1 && n.numbers.len() >= usize::from(request.gpus);
        if part.nodes.iter().any(fits) {
            return None;
        }
        Some(match mask {
            0 => format!("no node with GPUs is allowed by {}", request.constraint.describe()),
            _ => format!("no node that it may use has {} GPUs", request.gpus),
        })
    }

    /// Whether the constraint of the work is among those by which nodes are classed; if not, it is
    /// added, or another part is begun.
    fn has_class(&mut self, work: &Work) -> bool {
        let (Some(request), Some(part)) = (&work.request, &mut self.part) else { return false };
        if part.classes.mask(&request.constraint).is_some() {
            return true;
        }
        let constraint = &request.constraint;
        let nodes = &self.nodes;
        let allows = |name: &str| nodes.get(name).is_some_and(|n| constraint.allows(&n.node));
        if part.classes.stay_with(&allows) {
            part.classes.add(constraint.clone(), &allows);
            return true;
        }
        self.want_part(self.now, "a pod may run on a part of the nodes that were alike");
        false
    }

    /// Whether the engine knows the work as one that may start wherever its pods may. One that ran
    /// already when it was registered may also be where it ran, and its next pod may not.
    fn is_registered(&self, work: &Work) -> bool {
        let Some((job, part)) = work.job.zip(self.part.as_ref()) else { return false };
        let mask = work.request.as_ref().and_then(|r| part.classes.mask(&r.constraint));
        mask == Some(part.engine.state().spec(job).gpu_models)
    }

    fn register(&mut self, w: u32, work: &mut Work, on: Option<Placement>) {
        let weight = work.request.as_ref().map(|request| self.weight_of(&request.queue));
        let (Some(request), Some(part)) = (&work.request, &mut self.part) else { return };
        let mut mask = part.classes.mask(&request.constraint).unwrap_or(0);
        // Where it runs, it may run.
        for gpu in on.iter().flat_map(|on| &on.gpus) {
            mask |= 1 << part.engine.state().gpu(*gpu).gpu_model;
        }
        let expected = self.profiles.get(&request.profile);
        let profile = part.kind(request, expected.map(|e| &e.profile));
        let team = part.team(&request.queue);
        let mut spec = request.spec(work.size, profile, team, mask);
        // The engine gives all pods of a job the same: what the largest of a gang needs.
        for pod in work.pods.iter().filter_map(|uid| self.pods.get(uid)) {
            if let Some(Ok(own)) = &pod.request {
                spec.knobs.cpu_milli = spec.knobs.cpu_milli.max(own.knobs.cpu_milli);
                spec.knobs.host_mib = spec.knobs.host_mib.max(own.knobs.host_mib);
            }
        }
        if let Some(expected) = expected {
            if spec.knobs.mem_mib == 0 {
                spec.knobs.mem_mib = expected.mem_mib;
            }
            if !expected.profile.step_unknown {
                let steps = |s: Number| Number::of(s.get() / expected.profile.step_s.get());
                spec.work = request.seconds.map(steps);
            }
        }
        spec.weight = weight.unwrap_or(spec.weight);
        work.job = Some(part.add_job(w, &work.name, spec, on));
    }

    /// Where the pods of a work run already; its slots are laid there.
    fn place_of(&self, work: &mut Work) -> Found {
        let Some(part) = &self.part else { return Found::Down };
        let bound = || {
            let known = work.pods.iter().filter_map(|uid| Some((uid, self.pods.get(uid)?)));
            known.filter(|(_, k)| k.holds())
        };
        let mut slots = Vec::new();
        let mut knobs = Knobs::WHOLE;
        for (uid, known) in bound() {
            let (Some(node), Some(now)) = (known.node(), known.now()) else {
                return if known.under.is_some() { Found::Down } else { Found::Nowhere };
            };
            if now.suspended {
                return Found::Suspended;
            }
            knobs = now.knobs;
            slots.push(Slot { node: node.into(), gpus: now.gpus.clone(), pod: Some(uid.clone()) });
            // The places of the others of its gang were decided with it.
            let others = now.gang.iter().flat_map(|g| &g.places);
            for (node, gpus) in others {
                let same = |s: &Slot| s.node == *node && s.gpus == *gpus;
                if !slots.iter().any(same) {
                    slots.push(Slot { node: node.clone(), gpus: gpus.clone(), pod: None });
                }
            }
        }
        for i in (0..slots.len()).rev() {
            let twice = |(k, s): (usize, &Slot)| {
                k != i && s.node == slots[i].node && s.gpus == slots[i].gpus && s.pod.is_some()
            };
            if slots[i].pod.is_none() && slots.iter().enumerate().any(twice) {
                slots.remove(i);
            }
        }
        if slots.len() != usize::from(work.size) {
            return Found::Nowhere;
        }
        let mut gpus: Vec<GpuIdx> = Vec::new();
        for slot in &slots {
            if !self.nodes.get(&slot.node).is_some_and(|n| n.up) || part.node(&slot.node).is_none()
            {
                return Found::Down;
            }
            let known = self.nodes.get(&slot.node).and_then(|n| n.shape.as_ref());
            for number in &slot.gpus {
                let Some(gpu) = part.gpu(&slot.node, *number) else {
                    // Its GPU may be healthy again; whether it still runs there, it knows best.
                    let waits = known.is_some_and(|s| s.unhealthy.contains(number));
                    return if waits { Found::Down } else { Found::Nowhere };
                };
                gpus.push(gpu);
            }
        }
        gpus.sort_unstable();
        if gpus.windows(2).any(|pair| pair[0] == pair[1]) {
            return Found::Nowhere;
        }
        work.slots = slots;
        Found::At(Placement { gpus: GpuSet::from_slice(&gpus), knobs })
    }

    /// Brings the pods of a placed job to their places.
    fn carry_out(&mut self, w: u32, work: &mut Work, look: Look, leaving: &mut Vec<Event>) {
        let Some(job) = work.job else { return };
        let needed = work.needed(look);
        if look.alive < needed && (look.holding == 0 || work.gang.is_none()) {
            if look.holding == 0 {
                self.depart(w, work, look, leaving);
            }
            return;
        }
        if look.alive < needed && work.owner.is_none() {
            self.evict_all(work, "a pod of its gang is gone for good");
            return;
        }
        self.fill_slots(work);
        let Some(part) = &self.part else { return };
        let hot = part.engine.state().job(job);
        let (knobs, starting) = (hot.knobs, hot.phase == Phase::Starting);
        let mut runs = true;
        for at in 0..work.slots.len() {
            runs &= self.bring(w, work, at, knobs);
        }
        if runs && starting {
            work.tries = 0;
            leaving.push(Event::Started(job));
            leaving.extend(work.expected_load(job));
        }
    }

    /// Gives slots without a pod one that has none.
    fn fill_slots(&self, work: &mut Work) {
        let alive =
            |uid: &String| self.pods.get(uid).is_some_and(|k| k.is_alive() || k.pod.has_ended());
        for slot in &mut work.slots {
            slot.pod = slot.pod.take().filter(alive);
        }
        let taken: BTreeSet<String> = work.slots.iter().filter_map(|s| s.pod.clone()).collect();
        let free = |uid: &&String| {
            !taken.contains(*uid) && self.pods.get(*uid).is_some_and(Known::is_alive)
        };
        let free: Vec<String> = work.pods.iter().filter(free).cloned().collect();
        let mut free: Vec<String> = free;
        // One that is at a place already keeps it.
        for slot in work.slots.iter_mut().filter(|s| s.pod.is_none()) {
            let is_here = |uid: &String| {
                let known = &self.pods[uid];
                let at = known.node().zip(known.now());
                at.is_some_and(|(node, a)| node == slot.node && a.gpus == slot.gpus)
            };
            if let Some(at) = free.iter().position(is_here) {
                slot.pod = Some(free.remove(at));
            }
        }
        for slot in work.slots.iter_mut().filter(|s| s.pod.is_none()) {
            if free.is_empty() {
                return;
            }
            slot.pod = Some(free.remove(0));
        }
    }

    /// Brings the pod of a slot to its place; whether it runs there as it is to.
    fn bring(&mut self, w: u32, work: &mut Work, at: usize, knobs: Knobs) -> bool {
        let slot = work.slots[at].clone();
        let Some(uid) = slot.pod else { return false };
        let Some(known) = self.pods.get(&uid) else { return false };
        if known.pod.has_ended() {
            return known.pod.phase() == "Succeeded";
        }
        if known.under.is_some() || !known.is_alive() {
            return false;
        }
        let place = known.node().zip(known.now());
        let here = place.is_some_and(|(node, a)| node == slot.node && a.gpus == slot.gpus);
        if known.node().is_some() && !here {
            self.evict(&uid, "it is moved to other GPUs");
            return false;
        }
        let most = knobs.sm_most_permille.min(known.limit_permille());
        let wanted = Assignment {
            gpus: slot.gpus.clone(),
            knobs: Knobs { sm_most_permille: most, ..knobs },
            suspended: false,
            term: self.settings.term,
            decision: self.decisions,
            gang: (work.slots.len() > 1).then(|| Gang {
                places: work.slots.iter().map(|s| (s.node.clone(), s.gpus.clone())).collect(),
            }),
        };
        if let Some((_, now)) = place {
            if now.gives_the_same(&wanted) {
                return known.pod.phase() == "Running";
            }
            self.assign(w, &uid, wanted);
            return false;
        }
        // Nodes change: what was right when it was decided is looked at again.
        let request = work.request.as_ref();
        let node = self.nodes.get(&slot.node);
        let may = node.zip(request).is_some_and(|(n, r)| n.up && r.constraint.allows(&n.node));
        if !may || !self.has_room(&slot.node, &known.pod) {
            self.bounce(w, work);
            return false;
        }
        if !self.ledger.fits(&uid, &Hold::of(&slot.node, &wanted)) {
            self.counts.held_back += 1;
            self.blocked.entry(slot.node).or_default().insert(w);
            return false;
        }
        self.begin(&uid, Under::Bind { node: slot.node, assignment: wanted });
        false
    }

    /// Changes the assignment of a pod that is bound, once there is room for it.
    fn assign(&mut self, w: u32, uid: &str, wanted: Assignment) {
        let Some(node) = self.pods.get(uid).and_then(Known::node).map(String::from) else { return };
        if self.ledger.fits(uid, &Hold::of(&node, &wanted)) {
            self.begin(uid, Under::Assign { assignment: wanted });
        } else {
            self.counts.held_back += 1;
            self.blocked.entry(node).or_default().insert(w);
        }
    }

    /// Has a job leave its GPUs.
    fn vacate(&mut self, w: u32, work: &mut Work, look: Look, leaving: &mut Vec<Event>) {
        let Some(job) = work.job else { return };
        let stopped = |world: &Self| {
            let state = world.part.as_ref().map(|p| p.engine.state());
            Event::Stopped { job, done: Number::of(state.map_or(0.0, |s| s.done(job))) }
        };
        if work.suspended && look.holding > 0 && look.alive >= work.needed(look) {
            let by = *work.suspend_by.get_or_insert(self.now + SUSPENDS_WITHIN);
            if self.now < by {
                self.timers.insert((by, w));
                if self.suspend_all(w, work) {
                    work.suspend_by = None;
                    self.rooms.extend(work.slots.iter().map(|slot| slot.node.clone()));
                    leaving.push(stopped(self));
                }
                return;
            }
        }
        (work.suspended, work.suspend_by) = (false, None);
        self.evict_all(work, "other pods get its GPUs");
        if look.holding > 0 {
            return;
        }
        if look.alive >= work.needed(look) {
            work.since = self.now;
            leaving.push(stopped(self));
        } else {
            self.depart(w, work, look, leaving);
        }
    }

    /// Whether all pods stand still, as their agents say.
    fn suspend_all(&mut self, w: u32, work: &Work) -> bool {
        let mut all = true;
        for uid in work.pods.iter().cloned().collect::<Vec<_>>() {
            let Some(known) = self.pods.get(&uid).filter(|k| k.holds() && k.is_alive()) else {
                continue;
            };
            let Some(now) = known.now().cloned().filter(|_| known.under.is_none()) else {
                all = false;
                continue;
            };
            if !now.suspended {
                let (term, decision) = (self.settings.term, self.decisions);
                self.assign(w, &uid, Assignment { suspended: true, term, decision, ..now });
                all = false;
            } else if known.applied < Some(now.applied()) {
                all = false;
            }
        }
        all
    }

    /// The pods of a work are gone, and with them its place. Others may come.
    fn depart(&mut self, w: u32, work: &mut Work, look: Look, leaving: &mut Vec<Event>) {
        let Some(job) = work.job else { return };
        self.dismiss(work);
        work.slots.clear();
        work.suspended = false;
        work.since = self.now;
        if let Some(owner) = work.owner.clone() {
            leaving.push(Event::Withdrawn(job));
            let ended: Vec<String> = work.pods.iter().cloned().collect();
            for uid in ended {
                if self.pods.get(&uid).is_none_or(|k| !k.is_alive()) && work.gang.is_none() {
                    work.pods.remove(&uid);
                    if let Some(known) = self.pods.get_mut(&uid) {
                        known.work = None;
                        known.request = None;
                    }
                }
            }
            if work.gang.is_none() {
                self.headless.entry(owner).or_default().push(w);
                self.timers.insert((self.now + FORGET_AFTER, w));
            }
            self.dirty.insert(w);
            return;
        }
        work.over = true;
        leaving.push(if look.failed > 0 {
            let done = self.part.as_ref().map_or(0.0, |p| p.engine.state().done(job));
            Event::Failed { job, reason: Reason::UserError, done: Number::of(done) }
        } else {
            Event::Cancelled(job)
        });
    }

    fn evict_all(&mut self, work: &Work, why: &str) {
        for uid in &work.pods {
            if self.pods.get(uid).is_some_and(|k| k.holds() && k.is_alive()) {
                self.evict(uid, why);
            }
        }
    }

    fn evict(&mut self, uid: &str, why: &str) {
        let idle = |k: &&mut Known| k.under.is_none() && !k.evicted && !k.is_deleting();
        if let Some(known) = self.pods.get_mut(uid).filter(idle) {
            (known.under, known.sent) = (Some(Under::Evict), true);
            self.writes.push(Write::Evict { pod: known.named(), why: why.into() });
        }
    }

    fn begin(&mut self, uid: &str, under: Under) {
        self.decisions += 1;
        if let Some(known) = self.pods.get_mut(uid) {
            known.under = Some(under);
            known.sent = false;
        }
        let hold = self.pods.get(uid).and_then(Known::hold);
        self.ledger_set(uid, hold);
        self.send(uid);
    }

    /// Hands out the write that is under way for a pod.
    fn send(&mut self, uid: &str) {
        let Some(known) = self.pods.get_mut(uid) else { return };
        let pod = known.named();
        let write = match &known.under {
            None => return,
            Some(Under::Bind { node, assignment }) => {
                Write::Bind { pod, node: node.clone(), assignment: assignment.text() }
            }
            Some(Under::Assign { assignment }) => {
                Write::Assign { pod, assignment: assignment.text() }
            }
            Some(Under::Evict) => Write::Evict { pod, why: "other pods get its GPUs".into() },
        };
        known.sent = true;
        self.writes.push(write);
    }

    /// Hands out writes again whose answer was lost or came too early.
    fn resend(&mut self, work: &Work) {
        for uid in &work.pods {
            if self.pods.get(uid).is_some_and(|k| k.under.is_some() && !k.sent) {
                self.send(uid);
            }
        }
    }

    /// A write of a pod was refused.
    pub(super) fn refused(&mut self, w: u32, under: &Under) {
        if let Some(mut work) = self.works.get_mut(w as usize).and_then(Option::take) {
            if matches!(under, Under::Bind { .. }) {
                self.bounce(w, &mut work);
                self.dirty.insert(w);
            } else {
                self.timers.insert((self.now + BACKOFF, w));
            }
            self.works[w as usize] = Some(work);
        }
    }

    /// A work could not be started: it waits a while and is submitted again.
    fn bounce(&mut self, w: u32, work: &mut Work) {
        work.bounced = true;
        work.tries = (work.tries + 1).min(10);
        let pause = Span((BACKOFF.0 << (work.tries - 1)).min(10 * BACKOFF.0));
        work.not_before = self.now + pause;
        self.timers.insert((self.now, w));
    }

    fn why_it_waits(&self, work: &Work) -> String {
        let Some((job, part)) = work.job.zip(self.part.as_ref()) else { return String::new() };
        let state = part.engine.state();
        let name = |j: roommate_core::idx::JobIdx| {
            let work = part.works.get(j.0 as usize).and_then(|w| self.works.get(*w as usize));
            let name = work.and_then(|w| w.as_ref().map(|w| w.name.clone()));
            name.unwrap_or_else(|| "another pod".into())
        };
        let spec = state.spec(job);
        if state.usable_by(job) < u32::from(spec.gpus) {
            let exist = state.usable_by(job);
            let on = work.request.as_ref().map_or(String::new(), |r| r.constraint.describe());
            return format!(
                "needs {} GPUs; the nodes that it may use have {exist} ({on})",
                spec.gpus
            );
        }
        if let Some(reason) = state.job(job).last_reason {
            return reason.describe(&name);
        }
        let idle = state.idle_for(job);
        format!("waits for {} GPUs; {idle} that it may use are idle", spec.gpus)
    }

    /// Tells the pods of a work why they wait, once that is worth a write.
    pub(super) fn explain_later(&mut self, w: u32, work: &mut Work, why: &str) {
        let first = work.since + EXPLAIN_AFTER;
        let at = match &work.explained {
            None => first,
            Some((_, told)) if told == why => return,
            Some((at, _)) => *at + EXPLAIN_EVERY,
        };
        if self.now < at {
            self.timers.insert((at, w));
            return;
        }
        work.explained = Some((self.now, why.into()));
        for known in work.pods.iter().filter_map(|uid| self.pods.get(uid)) {
            if known.is_alive() && known.node().is_none() {
                self.writes.push(Write::Explain { pod: known.named(), why: why.into() });
            }
        }
    }

    /// Tells the pods of a work at once.
    pub(super) fn explain(&mut self, w: u32, why: &str) {
        let Some(Some(work)) = self.works.get(w as usize) else { return };
        for known in work.pods.iter().filter_map(|uid| self.pods.get(uid)) {
            self.writes.push(Write::Explain { pod: known.named(), why: why.into() });
        }
    }
}

/// Where the pods of a work are.
enum Found {
    At(Placement),
    Suspended,
    Down,
    Nowhere,
}

impl Work {
    /// Until a service is measured, its user knows best what will be asked of it.
    fn expected_load(&self, job: JobIdx) -> Option<Event> {
        let rate = self.request.as_ref()?.rate.filter(|rate| *rate > 0.0)?;
        let sample = Sample { load_rps: Number32::of(rate as f32), ..Sample::default() };
        Some(Event::Sampled { job, sample })
    }

    /// Pods that it still needs.
    fn needed(&self, look: Look) -> u32 {
        u32::from(self.size).saturating_sub(look.done)
    }
}

/// The gang of a pod, in the spellings that are known.
pub(crate) fn gang_of(pod: &Pod) -> Option<(String, String)> {
    let native = pod.spec.scheduling_group.as_ref().and_then(|g| g.pod_group_name.clone());
    let label = || names::GROUP_LABELS.iter().find_map(|l| pod.label(l)).map(String::from);
    let noted =
        || names::GROUP_ANNOTATIONS.iter().find_map(|a| pod.annotation(a)).map(String::from);
    let owned = || pod.annotation(names::GROUP_SIZE).and_then(|_| owner_of(pod));
    let name = native.or_else(label).or_else(noted).or_else(owned)?;
    Some((pod.namespace().into(), name))
}

/// Who makes the pod, and which of its pods it is where they are numbered.
fn owner_of(pod: &Pod) -> Option<String> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    let owner = owners.iter().find(|o| o.controller == Some(true))?;
    Some(owner.uid.clone())
}
