//! The spellings in which users ask for a part of a GPU, and what they ask for in ours.
//!
//! ```text
//!           GPUs                       MiB of each   part of each      percent of memory
//! HAMi      nvidia.com/gpu             gpumem        gpucores          gpumem-percentage
//! Volcano   volcano.sh/vgpu-number     vgpu-memory   vgpu-cores        vgpu-memory-percentage
//! KAI       gpu-fraction-num-devices   gpu-memory    gpu-fraction
//! ```
//!
//! The first two are resources of a container, those of KAI are annotations of the pod.
//! A pod that asks for `nvidia.com/gpu` alone asks for whole GPUs; that keeps its meaning.

use crate::names;
use crate::objects::amount;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value};

/// What a pod asks for in another spelling.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wish {
    /// The container that has the GPUs, by its place in the list.
    pub(super) container: usize,
    /// GPUs.
    pub(super) gpus: u16,
    /// Part of each, as our annotation.
    pub(super) share: Option<String>,
    /// Memory of each, as our annotation.
    pub(super) memory: Option<String>,
    /// What its user wrote: resources of the container, or annotations.
    pub(super) written: Vec<(String, String)>,
    /// Whose spelling it is.
    pub(super) of: &'static str,
    /// What could not be translated.
    pub(super) warnings: Vec<String>,
}

/// A spelling by resources of a container.
struct Resources {
    of: &'static str,
    gpus: &'static str,
    memory: &'static str,
    memory_percent: &'static str,
    share: &'static str,
    /// Whether GPUs alone, without a part, are asked for in this spelling.
    gpus_alone: bool,
}

const HAMI: Resources = Resources {
    of: "HAMi",
    gpus: "nvidia.com/gpu",
    memory: "nvidia.com/gpumem",
    memory_percent: "nvidia.com/gpumem-percentage",
    share: "nvidia.com/gpucores",
    gpus_alone: false,
};

const VOLCANO: Resources = Resources {
    of: "Volcano",
    gpus: "volcano.sh/vgpu-number",
    memory: "volcano.sh/vgpu-memory",
    memory_percent: "volcano.sh/vgpu-memory-percentage",
    share: "volcano.sh/vgpu-cores",
    gpus_alone: true,
};

/// Whole GPUs, as NVIDIA's device plugin offers them.
const WHOLE: &str = HAMI.gpus;
const KAI_FRACTION: &str = "gpu-fraction";
const KAI_MEMORY: &str = "gpu-memory";
const KAI_GPUS: &str = "gpu-fraction-num-devices";
const KAI_CONTAINER: &str = "gpu-fraction-container-name";

impl Resources {
    fn parts(&self) -> [&'static str; 3] {
        [self.memory, self.memory_percent, self.share]
    }

    /// Whether a container asks for GPUs in this spelling.
    fn is_in(&self, container: &Value) -> bool {
        let has = |name: &str| asked(container, name).is_some();
        self.parts().iter().any(|name| has(name)) || (self.gpus_alone && has(self.gpus))
    }

    fn read(&self, at: usize, container: &Value) -> Result<Wish, String> {
        let whole = |name, least, most| match asked(container, name) {
            None => Ok(None),
            Some(text) => whole_number(name, &text, least, most).map(Some),
        };
        // 0 stands for no limit in both.
        let some = |n: u32| (n > 0).then_some(n);
        let gpus = whole(self.gpus, 1, 64)?.unwrap_or(1);
        let memory = whole(self.memory, 0, MOST_MIB)?.and_then(some);
        let percent = whole(self.memory_percent, 0, 100)?.and_then(some);
        let share = whole(self.share, 0, 100)?.and_then(some);
        if memory.is_some() && percent.is_some() {
            return Err(both(self.memory, self.memory_percent));
        }
        let mut wish = Wish {
            container: at,
            gpus: gpus as u16,
            share: share.or(percent).map(|s| s.to_string()),
            memory: memory.map(|m| m.to_string()),
            written: Vec::new(),
            of: self.of,
            warnings: Vec::new(),
        };
        if percent.is_some_and(|p| p < 100) {
            wish.warnings.push(without_memory(self.memory_percent));
        }
        for name in std::iter::once(self.gpus).chain(self.parts()) {
            wish.written.extend(asked(container, name).map(|text| (name.into(), text)));
        }
        Ok(wish)
    }
}

/// The most MiB that a pod may ask for, as for our annotation.
const MOST_MIB: u32 = 4_000_000;

/// What a pod asks for in a spelling of others; none if it uses none.
pub(super) fn read(pod: &Value) -> Result<Option<Wish>, String> {
    let containers = list(pod, "/spec/containers");
    if containers.is_empty() {
        // The API server says that better.
        return Ok(None);
    }
    let uses = |c: &Value| HAMI.is_in(c) || VOLCANO.is_in(c);
    let mut found = containers.iter().enumerate().filter(|(_, c)| uses(c));
    let by_resources = found.next();
    if let (Some((_, first)), Some((_, second))) = (by_resources, found.next()) {
        return Err(format!(
            "containers {:?} and {:?} both ask for parts of GPUs: give all GPUs to one of them",
            name_of(first),
            name_of(second)
        ));
    }
    if let Some(init) = list(pod, "/spec/initContainers").iter().find(|c| uses(c)) {
        let name = name_of(init);
        return Err(format!(
            "init container {name:?} asks for parts of GPUs: only a container of the pod can"
        ));
    }
    let by_annotations = [KAI_FRACTION, KAI_MEMORY].iter().find(|n| annotation(pod, n).is_some());
    let wish = match (by_resources, by_annotations) {
        (None, None) => return Ok(None),
        (Some((_, container)), Some(annotation)) => {
            let resource = if HAMI.is_in(container) { HAMI.of } else { VOLCANO.of };
            return Err(format!(
                "annotation {annotation} and resources of {resource} both ask for parts of GPUs: \
                 use one of them"
            ));
        }
        (Some((at, container)), None) => match (HAMI.is_in(container), VOLCANO.is_in(container)) {
            (true, true) => return Err(both("nvidia.com/gpu...", "volcano.sh/vgpu-...")),
            (true, false) => HAMI.read(at, container)?,
            (false, _) => VOLCANO.read(at, container)?,
        },
        (None, Some(_)) => read_annotations(pod, containers)?,
    };
    refuse_mixed(pod, containers, &wish)?;
    Ok(Some(wish))
}

/// KAI's annotations.
fn read_annotations(pod: &Value, containers: &[Value]) -> Result<Wish, String> {
    let (fraction, memory) = (annotation(pod, KAI_FRACTION), annotation(pod, KAI_MEMORY));
    if fraction.is_some() && memory.is_some() {
        return Err(both(KAI_FRACTION, KAI_MEMORY));
    }
    let share = fraction.map(|text| {
        let value = text.trim().parse::<f64>().ok().filter(|f| (0.01..=1.0).contains(f));
        let expected = || {
            format!("annotation {KAI_FRACTION}: expected a number from 0.01 to 1, found {text:?}")
        };
        // Our shares are permille.
        value.map(|f| ((f * 1000.0).round() / 10.0).to_string()).ok_or_else(expected)
    });
    let number = |name, least, most| match annotation(pod, name) {
        None => Ok(None),
        Some(text) => whole_number(&format!("annotation {name}"), text, least, most).map(Some),
    };
    let gpus = number(KAI_GPUS, 1, 64)?.unwrap_or(1);
    let memory = number(KAI_MEMORY, 1, MOST_MIB)?;
    let container = match annotation(pod, KAI_CONTAINER) {
        None => 0,
        Some(wanted) => {
            let at = containers.iter().position(|c| name_of(c) == wanted);
            at.ok_or_else(|| {
                format!("annotation {KAI_CONTAINER}: the pod has no container {wanted:?}")
            })?
        }
    };
    let written = [KAI_FRACTION, KAI_MEMORY, KAI_GPUS, KAI_CONTAINER];
    let written =
        written.iter().filter_map(|n| Some(((*n).to_string(), annotation(pod, n)?.to_string())));
    let share = share.transpose()?;
    let part = share.as_ref().is_some_and(|s| s != "100");
    Ok(Wish {
        container,
        gpus: gpus as u16,
        share,
        memory: memory.map(|m| m.to_string()),
        written: written.collect(),
        of: "KAI",
        warnings: part.then(|| without_memory(KAI_FRACTION)).into_iter().collect(),
    })
}

/// Whole GPUs, or ours, besides parts of GPUs in another spelling: it is not clear what is meant.
fn refuse_mixed(pod: &Value, containers: &[Value], wish: &Wish) -> Result<(), String> {
    let part = wish.written.iter().find(|(name, _)| *name != WHOLE);
    let part = part.map(|(name, _)| name.as_str()).unwrap_or_default();
    for (at, container) in containers.iter().enumerate() {
        // Part of HAMi's own spelling.
        let own = at == wish.container && wish.of == HAMI.of;
        let others = [names::RESOURCE, WHOLE];
        let other = others.iter().find(|r| asked(container, r).is_some() && !(own && **r == WHOLE));
        if let Some(other) = other {
            return Err(both(other, part));
        }
    }
    for (name, value) in [(names::SHARE, &wish.share), (names::MEMORY, &wish.memory)] {
        if let (Some(ours), Some(theirs)) = (annotation(pod, name), value)
            && ours.trim() != theirs
        {
            return Err(format!(
                "annotation {name} says {ours:?} and {part} asks for {theirs}: use one of them"
            ));
        }
    }
    Ok(())
}

fn both(one: &str, other: &str) -> String {
    format!("it asks for {one} and for {other}: use one of them")
}

/// At most 120 characters: kubectl cuts what is longer.
fn without_memory(name: &str) -> String {
    format!("{name}: became {}; only {} (MiB) limits memory", names::SHARE, names::MEMORY)
}

fn whole_number(name: &str, text: &str, least: u32, most: u32) -> Result<u32, String> {
    let value = amount(&Quantity(text.into()));
    let value =
        value.filter(|v| v.fract() == 0.0 && (f64::from(least)..=f64::from(most)).contains(v));
    let expected =
        || format!("{name}: expected a whole number from {least} to {most}, found {text:?}");
    value.map(|v| v as u32).ok_or_else(expected)
}

/// What a container asks of a resource, as it is written.
pub(super) fn asked(container: &Value, resource: &str) -> Option<String> {
    let of = |kind: &str| container.get("resources")?.get(kind)?.get(resource);
    match of("limits").or_else(|| of("requests"))? {
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// An annotation of a pod.
pub(super) fn annotation<'a>(pod: &'a Value, name: &str) -> Option<&'a str> {
    pod.pointer("/metadata/annotations")?.get(name)?.as_str()
}

/// A list of a pod; empty if it has none.
pub(super) fn list<'a>(pod: &'a Value, pointer: &str) -> &'a [Value] {
    pod.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The name of a container.
pub(super) fn name_of(container: &Value) -> &str {
    container.get("name").and_then(Value::as_str).unwrap_or_default()
}

/// A map of a pod, made if it is not there.
pub(super) fn map<'a>(of: &'a mut Value, name: &str) -> Option<&'a mut Map<String, Value>> {
    let entry = of.as_object_mut()?.entry(name).or_insert_with(|| Value::Object(Map::new()));
    if entry.is_null() {
        *entry = Value::Object(Map::new());
    }
    entry.as_object_mut()
}
