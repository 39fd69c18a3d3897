//! Pods of a resource: from an image and a command, or from a whole template, with what Roommate
//! has to know of them.

use crate::names;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A variable of the container's environment.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Variable {
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its value.
    #[serde(default)]
    pub value: String,
}

/// The schema of a pod template: the API server checks it when pods are made of it.
pub(super) fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "nullable": true,
        "x-kubernetes-preserve-unknown-fields": true,
        "description": "The pods, as in a Deployment or Job: metadata and spec. The container that \
            asks for GPUs, or else the first, gets them. Give this, or image and command.",
    })
}

/// What resources that become pods have in common.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pods {
    /// GPUs of each pod, all on one node.
    #[serde(default = "one")]
    #[schemars(with = "i32", range(min = 1, max = 64))]
    pub gpus: u16,
    /// Promised part of each GPU, in percent of its multiprocessors. Without it the pods count as
    /// whole GPUs, and may share them as their class allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1.0, max = 100.0))]
    pub share_percent: Option<f64>,
    /// Memory of each GPU, MiB.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>", range(min = 1, max = 4_000_000))]
    pub memory_mib: Option<u32>,
    /// The queue, whose quota counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub queue: Option<String>,
    /// The kind of work, a `GpuProfile` or any name: what is learned of pods with the same name
    /// holds for all of them. Of a service, its model unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub profile: Option<String>,
    /// The image of its container; or give template.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub image: Option<String>,
    /// The program of the container, if not that of the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000))]
    pub command: Vec<String>,
    /// Its arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000))]
    pub args: Vec<String>,
    /// Variables of its environment. Unless given, pods of a gang also get `MASTER_ADDR`,
    /// `MASTER_PORT`, `WORLD_SIZE` (the number of pods) and `JOB_COMPLETION_INDEX` (which of them
    /// it is), and those of a service `ROOMMATE_OBJECTIVE`, `ROOMMATE_PORT`, `ROOMMATE_MODEL` and
    /// `ROOMMATE_MAX_BATCH`, which `roommate kube front` reads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000))]
    pub env: Vec<Variable>,
    /// Its pods as a whole, instead of image and command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::crd::template::schema")]
    pub template: Option<Value>,
}

pub(super) fn one() -> u16 {
    1
}

/// What else Roommate has to know of the pods.
#[derive(Default)]
pub(super) struct Marks {
    pub(super) annotations: Vec<(&'static str, Option<String>)>,
    pub(super) labels: Vec<(&'static str, Option<String>)>,
    /// Variables of the container with the GPUs, unless it has its own of that name.
    pub(super) env: Vec<(&'static str, String)>,
    /// The port of the container with the GPUs.
    pub(super) port: Option<u16>,
}

impl Pods {
    /// The template of the pods.
    pub(super) fn marked(&self, marks: &Marks, scheduler: &str) -> Result<Value, String> {
        let mut pods = match (&self.template, &self.image) {
            (Some(template), None) => template.clone(),
            (None, Some(image)) => json!({"spec": {"containers": [self.container(image)]}}),
            _ => return Err("expected either template or image".into()),
        };
        let annotations = [
            (names::SHARE, self.share_percent.map(|v| v.to_string())),
            (names::MEMORY, self.memory_mib.map(|v| v.to_string())),
            (names::PROFILE, self.profile.clone()),
        ];
        let labels = [(names::QUEUE, self.queue.clone())];
        let metadata = object(&mut pods, "metadata")?;
        for (place, all, own) in [
            ("annotations", &marks.annotations, &annotations[..]),
            ("labels", &marks.labels, &labels[..]),
        ] {
            let found = object_in(metadata, place)?;
            for (name, value) in all.iter().chain(own) {
                if let Some(value) = value {
                    found.insert((*name).into(), json!(value));
                }
            }
        }
        let spec = object(&mut pods, "spec")?;
        match spec.get("schedulerName").and_then(Value::as_str) {
            Some(other) if other != scheduler => {
                return Err(format!(
                    "template.spec.schedulerName: expected {scheduler}, found {other}"
                ));
            }
            _ => drop(spec.insert("schedulerName".into(), json!(scheduler))),
        }
        let containers = spec.get_mut("containers").and_then(Value::as_array_mut);
        let Some(containers) = containers.filter(|all| !all.is_empty()) else {
            return Err("template.spec.containers: expected a container".into());
        };
        let limit = format!("/resources/limits/{}", names::RESOURCE.replace('/', "~1"));
        let asks = containers.iter().position(|c| c.pointer(&limit).is_some());
        let container = &mut containers[asks.unwrap_or(0)];
        let resources = object(container, "resources")?;
        object_in(resources, "limits")?
            .insert(names::RESOURCE.into(), json!(self.gpus.to_string()));
        if let Some(port) = marks.port {
            add_port(container, port)?;
        }
        add_variables(container, &marks.env)?;
        Ok(pods)
    }

    fn container(&self, image: &str) -> Value {
        let mut container = json!({"name": "main", "image": image});
        for (name, words) in [("command", &self.command), ("args", &self.args)] {
            if !words.is_empty() {
                container[name] = json!(words);
            }
        }
        if !self.env.is_empty() {
            container["env"] = json!(self.env);
        }
        container
    }
}

/// The port, and a probe of it: a service counts as started once it answers.
fn add_port(container: &mut Value, port: u16) -> Result<(), String> {
    let ports = list(container, "ports")?;
    if !ports.iter().any(|p| p["containerPort"] == json!(port)) {
        ports.push(json!({"name": "http", "containerPort": port}));
    }
    let probed = container.get("readinessProbe").is_some();
    if !probed {
        container["readinessProbe"] = json!({"tcpSocket": {"port": port}, "periodSeconds": 5});
    }
    Ok(())
}

fn add_variables(container: &mut Value, env: &[(&'static str, String)]) -> Result<(), String> {
    if env.is_empty() {
        return Ok(());
    }
    let found = list(container, "env")?;
    for (name, value) in env {
        if !found.iter().any(|e| e["name"] == json!(name)) {
            found.push(json!({"name": name, "value": value}));
        }
    }
    Ok(())
}

fn list<'a>(of: &'a mut Value, name: &str) -> Result<&'a mut Vec<Value>, String> {
    let wrong = || format!("template: expected {name} to be a list");
    let map = of.as_object_mut().ok_or_else(wrong)?;
    map.entry(name).or_insert_with(|| json!([])).as_array_mut().ok_or_else(wrong)
}

fn object<'a>(of: &'a mut Value, name: &str) -> Result<&'a mut Map<String, Value>, String> {
    let wrong = || format!("template: expected {name} within an object");
    object_in(of.as_object_mut().ok_or_else(wrong)?, name)
}

fn object_in<'a>(
    of: &'a mut Map<String, Value>,
    name: &str,
) -> Result<&'a mut Map<String, Value>, String> {
    let found = of.entry(name).or_insert_with(|| json!({}));
    found.as_object_mut().ok_or_else(|| format!("template: expected {name} to be an object"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(template: &Value) -> Result<Value, String> {
        let pods = json!({"gpus": 2, "sharePercent": 50, "template": template});
        let pods: Pods = serde_json::from_value(pods).unwrap();
        let env = vec![("A", "ours".into()), ("B", "ours".into())];
        pods.marked(&Marks { env, ..Marks::default() }, "roommate")
    }

    #[test]
    fn a_template_keeps_what_its_user_wrote() {
        let pods = from(&json!({
            "metadata": {"annotations": {"mine": "kept"}},
            "spec": {"containers": [
                {"name": "side", "image": "s"},
                {"name": "main", "image": "m", "env": [{"name": "A", "value": "mine"}],
                 "resources": {"limits": {"roommate.dev/gpu": "1", "cpu": "3"}}},
            ]},
        }))
        .unwrap();
        let annotations = json!({"mine": "kept", "roommate.dev/gpu-share": "50"});
        assert_eq!(pods["metadata"]["annotations"], annotations);
        assert_eq!(pods["spec"]["schedulerName"], "roommate");
        let [side, main] = &pods["spec"]["containers"].as_array().unwrap()[..] else { panic!() };
        assert_eq!(side.get("resources"), None);
        assert_eq!(main["resources"]["limits"], json!({"roommate.dev/gpu": "2", "cpu": "3"}));
        let env = json!([{"name": "A", "value": "mine"}, {"name": "B", "value": "ours"}]);
        assert_eq!(main["env"], env);
    }

    #[test]
    fn a_template_that_is_none_is_named() {
        for (template, why) in [
            (json!({}), "template.spec.containers: expected a container"),
            (json!({"spec": []}), "template: expected spec to be an object"),
            (
                json!({"spec": {"containers": [{"resources": 1}]}}),
                "template: expected resources to be an object",
            ),
            (
                json!({"spec": {"schedulerName": "other", "containers": [{}]}}),
                "template.spec.schedulerName: expected roommate, found other",
            ),
        ] {
            assert_eq!(from(&template).unwrap_err(), why);
        }
    }
}
