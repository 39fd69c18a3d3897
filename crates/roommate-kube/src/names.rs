//! The names by which users and the parts of Roommate find each other in a cluster: annotations,
//! labels, the resource.

/// The group of all names.
pub const GROUP: &str = "roommate.dev";
/// The scheduler that pods name in `spec.schedulerName`.
pub const SCHEDULER: &str = "roommate";
/// The extended resource of which a pod asks one for each GPU that it uses.
pub const RESOURCE: &str = "roommate.dev/gpu";

/// Promised part of each GPU, in percent of its multiprocessors.
pub const SHARE: &str = "roommate.dev/gpu-share";
/// Memory of each GPU, in MiB.
pub const MEMORY: &str = "roommate.dev/gpu-mem";
/// `guaranteed`, `best-effort` or `service`.
pub const CLASS: &str = "roommate.dev/class";
/// How much longer roommates may make its steps, 1.5 for half as long again.
pub const MAX_SLOWDOWN: &str = "roommate.dev/max-slowdown";
/// The latency that a service has to keep, `p99=25ms`.
pub const OBJECTIVE: &str = "roommate.dev/objective";
/// The most of each GPU that the pod may use, in percent; may be changed while it runs.
pub const LIMIT: &str = "roommate.dev/gpu-limit";
/// Batch sizes per GPU that training may use, `32..64..256`: the least, its own, the most.
pub const BATCH: &str = "roommate.dev/batch";
/// The kind of work: what is learned of pods with the same name holds for all of them.
pub const PROFILE: &str = "roommate.dev/profile";
/// Seconds that the pod takes alone, for policies that use declared lengths.
pub const SECONDS: &str = "roommate.dev/expected-seconds";
/// The queue, a label: the team to which the pod counts.
pub const QUEUE: &str = "roommate.dev/queue";

/// The model of a service.
pub const MODEL: &str = "roommate.dev/model";
/// Most requests in a batch of a service.
pub const MAX_BATCH: &str = "roommate.dev/max-batch";
/// Requests per second that are expected of a service at busy times.
pub const EXPECTED_RATE: &str = "roommate.dev/expected-rate";
/// The `GpuService` of a pod, a label.
pub const SERVICE: &str = "roommate.dev/service";
/// Who made an object, a label; the value is `roommate`.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// A label of pods: `ignore` keeps the webhook from them.
pub const WEBHOOK: &str = "roommate.dev/webhook";
/// What the webhook translated into these names, as its user wrote it.
pub const TRANSLATED: &str = "roommate.dev/translated-from";

/// What the scheduler decided for a pod; written with the binding.
pub const ASSIGNMENT: &str = "roommate.dev/assignment";
/// What the node's agent has put into force; a copy of the assignment's decision.
pub const APPLIED: &str = "roommate.dev/applied";
/// What the agent measured of a pod since the last time.
pub const MEASURED: &str = "roommate.dev/measured";
/// What the agent of a node says of its GPUs, an annotation of the node.
pub const INVENTORY: &str = "roommate.dev/inventory";
/// Pods that can share a GPU of this node, a label of nodes without an agent; 1 if not given.
pub const SLOTS: &str = "roommate.dev/slots";

/// Names of pod groups, in the order in which they are looked for.
pub const GROUP_LABELS: [&str; 1] = ["scheduling.x-k8s.io/pod-group"];
/// The same as annotations.
pub const GROUP_ANNOTATIONS: [&str; 2] = ["scheduling.k8s.io/group-name", "pod-group-name"];
/// Pods that a group needs to start, where no `PodGroup` says it: an annotation of its pods.
pub const GROUP_SIZE: &str = "roommate.dev/pod-group-size";
