-- Prepares jobs with adaptive flags for Penstock, inside slurmctld.
--
-- The SPANK plugin sends the flags in the job's SPANK environment. A user can write that environment with another
-- program, so every value is checked again here, and a malformed one is refused. An accepted job is held for the
-- daemon. It gets its job spec as JSON in admin_comment, which users cannot write, and an untyped count of its fewest
-- GPUs (Slurm 22.05 cannot change the type of a pending job's GPUs). Jobs without the flags are not changed.
--
-- slurmctld waits while this runs, and Slurm bounds no text before. It reads two small files, and its work for a user's text
-- grows no faster than the text and a site's list of nodes. Nothing here talks to penstockd. While penstockd is down, jobs
-- are accepted and wait; with `plain_after_s`, Slurm starts them as plain jobs after that time. Works with Lua 5.1 to 5.4.

local penstock = {}

local HERE = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local SITE, STARTS = HERE .. "penstock_site.lua", HERE .. "penstock_starts.lua"
local MOST_DIGITS, MOST_NAME, MOST_LIST = 9, 64, 1024 -- as in flags.c
local MOST_TASKS = 2 ^ 16 - 3 -- on a node, as Slurm counts them
local MOST_NODES = 10000 -- in a list of nodes
local MOST_LOOKED_AT = 2 ^ 22 -- bytes, in all steps of expanding a list of nodes

-- Readers: from a flag's text to its value, or nil if the text does not have the flag's form. flags.c accepts the same
-- texts.

local function count(text)
  if #text <= MOST_DIGITS and text:find("^[1-9][0-9]*$") then return tonumber(text) end
end

-- Only such names are written as JSON: they need no escapes.
local function name(text)
  if #text <= MOST_NAME and text:find("^[A-Za-z0-9][A-Za-z0-9._+-]*$") then return text end
end

local function choice(text, flag)
  for _, each in ipairs(flag.choices) do
    if text == each then return text end
  end
end

local function items(text)
  return #text <= MOST_LIST and (text .. ","):gmatch("([^,]*),") or function() end
end

local function types(text)
  local excluded, found = text:sub(1, 1) == "^", {}
  for item in items(text) do
    if excluded then item = item:match("^%^(.*)$") end
    if not item or not name(item) then return nil end
    found[#found + 1] = item
  end
  return #found > 0 and {excluded = excluded, names = found} or nil
end

local function units(text)
  if count(text) then return {all = count(text), names = {}, of = {}} end
  local found, twice = {names = {}, of = {}}, nil
  for item in items(text) do
    local gpu_type, number = item:match("^([^=]*)=(.*)$")
    if not gpu_type or not name(gpu_type) or not count(number) then return nil end
    if found.of[gpu_type] then twice = "names " .. gpu_type .. " twice" end
    found.names[#found.names + 1] = gpu_type
    found.of[gpu_type] = count(number)
  end
  return #found.names > 0 and not twice and found or nil, twice
end

-- As JSON. The cents stay as they were typed: a floating-point number might be rounded or follow a locale.
local function dollars(text)
  local whole, cents = text:match("^([0-9]+)%.?([0-9]*)$")
  if not whole or #whole > MOST_DIGITS or #cents > 2 or (cents == "" and text:find("%.")) then return nil end
  if not text:find("[1-9]") then return nil end
  return string.format("%d", tonumber(whole)) .. (cents ~= "" and "." .. cents or "")
end

local function bytes(text)
  local number, unit = text:match("^([1-9][0-9]*)([KMGT])$")
  if not number or #number > 6 then return nil end
  return string.format("%.0f", tonumber(number) * 1024 ^ ("KMGT"):find(unit))
end

-- In seconds, from minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]], as in --time.
local function seconds(text)
  local days, rest = text:match("^([0-9]+)%-(.*)$")
  local parts = {}
  for part in ((rest or text) .. ":"):gmatch("([^:]*):") do
    local most = (not rest and #parts == 0) and 6 or 2
    if not part:find("^[0-9]+$") or #part > most then return nil end
    parts[#parts + 1] = tonumber(part)
  end
  if #parts > 3 or (days and #days > 6) then return nil end
  for i, part in ipairs(parts) do
    if (i > 1 and part > 59) or (i == 1 and days and part > 23) then return nil end
  end
  local total
  if days then
    total = tonumber(days) * 86400 + parts[1] * 3600 + (parts[2] or 0) * 60 + (parts[3] or 0)
  elseif #parts == 3 then
    total = parts[1] * 3600 + parts[2] * 60 + parts[3]
  else
    total = parts[1] * 60 + (parts[2] or 0)
  end
  return total > 0 and total or nil
end

local READERS = {
  choice = choice, count = count, types = types, units = units, name = name, switch = choice, dollars = dollars,
  size = bytes, time = seconds,
}

-- Writers: from a flag's value to a field of the job spec in JSON; nil if the flag sets nothing.

local function quoted(text) return '"' .. text .. '"' end

local function text_field(value, flag) return quoted(flag.field) .. ":" .. quoted(value) end

local function number_field(value, flag)
  return quoted(flag.field) .. ":" .. (type(value) == "string" and value or string.format("%d", value))
end

local function switch_field(switch, flag) return switch == "yes" and quoted(flag.field) .. ":" .. flag.yes or nil end

local function types_field(value)
  local names = {}
  for i, each in ipairs(value.names) do names[i] = quoted(each) end
  return quoted(value.excluded and "excluded_gpu_types" or "gpu_types") .. ":[" .. table.concat(names, ",") .. "]"
end

local function units_field(value, flag)
  if value.all then return number_field(value.all, flag) end
  local fields = {}
  for i, gpu_type in ipairs(value.names) do fields[i] = number_field(value.of[gpu_type], {field = gpu_type}) end
  return quoted(flag.field) .. ":{" .. table.concat(fields, ",") .. "}"
end

local WRITERS = {
  choice = text_field, count = number_field, types = types_field, units = units_field, name = text_field,
  switch = switch_field, dollars = number_field, size = number_field, time = number_field,
}

-- The flags, in the order of flags.def.
-- generated by script/generate from scheduler/penstock_scheduler/model/spec.py: do not edit
local FLAGS = {
  {name = "adaptive", field = "adaptivity", syntax = "choice", example = "strong-scaling",
   form = "adaptive, strong-scaling or rigid", choices = {"adaptive", "strong-scaling", "rigid"}},
  {name = "min-gpus", field = "min_gpus", syntax = "count", example = "2",
   form = "a whole number from 1 to 999999999"},
  {name = "max-gpus", field = "max_gpus", syntax = "count", example = "8",
   form = "a whole number from 1 to 999999999"},
  {name = "gpu-types", field = "gpu_types", syntax = "types", example = "a100,t4",
   form = "GPU types such as a100,t4, or ^t4 for all but t4"},
  {name = "batch-size", field = "batch_size", syntax = "count", example = "256",
   form = "a whole number from 1 to 999999999"},
  {name = "max-batch-size", field = "max_batch_size", syntax = "count", example = "4096",
   form = "a whole number from 1 to 999999999"},
  {name = "scale-unit", field = "scale_unit", syntax = "units", example = "a100=2,rtx=8",
   form = "a whole number, or one for each type"},
  {name = "model-family", field = "model_family", syntax = "name", example = "bert-squad",
   form = "a name of at most 64 letters, digits and ._+-"},
  {name = "sensitivity", field = "sensitivity", syntax = "name", example = "resnet18",
   form = "a name of at most 64 letters, digits and ._+-"},
  {name = "gpu-class", field = "gpu_class", syntax = "choice", example = "opportunistic",
   form = "guaranteed or opportunistic", choices = {"guaranteed", "opportunistic"}},
  {name = "non-preemptible", field = "preemptible", syntax = "switch", example = "yes",
   form = "yes or no", choices = {"yes", "no"}, yes = "false"},
  {name = "burst", field = "burst", syntax = "choice", example = "allowed",
   form = "never, allowed or only", choices = {"never", "allowed", "only"}},
  {name = "burst-budget", field = "burst_budget_usd", syntax = "dollars", example = "12.50",
   form = "dollars, with or without cents"},
  {name = "data-size", field = "data_size_bytes", syntax = "size", example = "500G",
   form = "a whole number and K, M, G or T"},
  {name = "checkpoint-every", field = "checkpoint_every_s", syntax = "time", example = "30",
   form = "a time as --time takes it: minutes, hours:minutes:seconds or days-hours"},
  {name = "checkpointable", field = "checkpointable", syntax = "switch", example = "yes",
   form = "yes or no", choices = {"yes", "no"}, yes = "true"},
  {name = "grow-shrink", field = "grow_shrink", syntax = "switch", example = "yes",
   form = "yes or no", choices = {"yes", "no"}, yes = "true"},
  {name = "trial-group", field = "trial_group", syntax = "name", example = "lr-search",
   form = "a name of at most 64 letters, digits and ._+-"},
  {name = "runtime", field = "runtime_s", syntax = "time", example = "8:00:00",
   form = "a time as --time takes it: minutes, hours:minutes:seconds or days-hours"},
}
-- end of the generated part

local VARIABLES = {} -- MIN_GPUS -> min-gpus
for _, flag in ipairs(FLAGS) do VARIABLES[flag.name:upper():gsub("-", "_")] = flag.name end

-- What a user typed, shortened and without control characters.
local function shown(text)
  return (text:sub(1, 80):gsub("[%c\127-\255]", "?"))
end

local function set_of(list)
  local set = {}
  for _, each in ipairs(list) do set[each] = true end
  return set
end

local function sorted(set)
  local list = {}
  for each in pairs(set) do list[#list + 1] = each end
  table.sort(list)
  return list
end

-- Refuses the job for a reason that the user can fix. Any other error is the site's or ours.
local function refuse(...)
  error({refusal = string.format(...)}, 0)
end

-- Returns a function that runs a part and keeps its refusals, one that notes a refusal, and the refusals so far.
local function gathering()
  local found = {}
  local function complain(...) found[#found + 1] = string.format(...) end
  local function try(part, ...)
    local fine, first, second = pcall(part, ...)
    if fine then return first, second end
    if type(first) ~= "table" or not first.refusal then error(first, 0) end
    for _, text in ipairs(first.refusals or {first.refusal}) do found[#found + 1] = text end
  end
  return try, complain, found
end

-- All flags of a job: name -> text; nil where it has none.
local function flags_of(job)
  local found
  for _, entry in pairs(job.spank_job_env or {}) do
    local variable, text = entry:match("^PENSTOCK_([A-Z_]+)=(.*)$")
    if variable then
      found = found or {}
      found[VARIABLES[variable] or variable] = text
    end
  end
  return found
end

-- GPU type -> most GPUs of one of its nodes.
local function largest_nodes(site, allows)
  local most = {}
  for _, partition in ipairs(site.partitions) do
    for gpu_type, sizes in pairs(partition.types) do
      for node, size in pairs(sizes) do
        if not allows or allows(node) then most[gpu_type] = math.max(most[gpu_type] or 0, size) end
      end
    end
  end
  return most
end

local function check_types(flag, names, known)
  for _, gpu_type in ipairs(names) do
    if not known[gpu_type] then
      refuse("--%s: there are no GPUs of type %s here; the types are %s", flag, gpu_type, table.concat(sorted(known), ", "))
    end
  end
end

-- The request of an ordinary header: GPUs, nodes, tasks, CPUs and memory. It is the most that the job gets. With fewer GPUs,
-- the job keeps its tasks, CPUs and memory for each GPU.

local function given_number(value)
  return value ~= nil and value ~= slurm.NO_VAL and value ~= slurm.NO_VAL16 and value ~= slurm.NO_VAL8
    and value ~= slurm.NO_VAL64
end

local function number(value) return given_number(value) and value or nil end

local function common_divisor(a, b)
  while b > 0 do a, b = b, a % b end
  return a
end

local function multiple_of(a, b) return a / common_divisor(a, b) * b end

-- The GPUs in gres:gpu:a100:4, gres/gpu=8 or cpu:4,gres/gpu:2: how many, and of which type. nil if there are none.
local function gpus_in(text, option)
  local found, found_type
  local typed, alone = shown((text:gsub("gres[:/]", ""))), nil
  for item in (text .. ","):gmatch("([^,]*),") do
    local gres = item:match("^gres[:/](.*)$")
    local parts = {}
    for part in (gres or item):gmatch("[^:=]+") do parts[#parts + 1] = part end
    if parts[1] == "gpu" then
      local count = #parts > 1 and parts[#parts]:match("^[0-9]+$")
      local gpu_type = parts[2] ~= count and parts[2] or #parts > 2 and parts[2] or nil
      if found or #parts > 3 or (count and #count > MOST_DIGITS) or count == "0" or (gpu_type and not name(gpu_type)) then
        refuse("%s=%s: give one number of GPUs, of one type at most, such as %s=gpu:a100:4; for several types use --gpu-types",
          option, typed, option)
      end
      found, found_type = tonumber(count or 1), gpu_type
    elseif gres or #parts > 2 then
      alone = shown(gres or item)
    end
  end
  if alone then
    local gpus = found and string.format("write %s=gpu:%s%d", option, found_type and found_type .. ":" or "", found)
    refuse("%s=%s: Penstock plans with GPUs alone: submit the job without --adaptive, or %s", option, typed, gpus or "leave out " .. alone)
  end
  return found, found_type
end

local function at_least_one(gpus, option)
  if gpus < 1 or gpus % 1 ~= 0 or gpus > 10 ^ MOST_DIGITS then
    refuse("%s does not go with the number of tasks: it makes %s GPUs", option, tostring(gpus))
  end
  return gpus
end

-- What the header asks for, or nil if it names no GPUs: `gpus` in all, `gpu_type`; the most `nodes`; `on_node`, GPUs on each
-- node, where that is known; `each`, the GPUs of a task where the header says so itself.
local function gpus_asked(job, nodes, tasks)
  for _, field in ipairs({"tres_per_node", "tres_per_job", "tres_per_task"}) do
    if #(job[field] or "") > MOST_LIST then refuse("the request of GPUs is too long: give at most %d characters", MOST_LIST) end
  end
  local on_node, gpu_type = nil, nil
  if job.tres_per_node ~= nil then
    on_node, gpu_type = gpus_in(job.tres_per_node, "--gres")
    if on_node then return {gpus = on_node * (nodes or 1), gpu_type = gpu_type, nodes = nodes or 1} end
  end
  if job.tres_per_job ~= nil then
    local gpus, of = gpus_in(job.tres_per_job, "--gpus")
    if gpus then return {gpus = gpus, gpu_type = of, nodes = nodes or tasks or 1} end
  end
  local each, of = gpus_in(job.tres_per_task or "", "--gpus-per-task")
  if each then
    tasks = tasks or nodes or 1
    return {gpus = at_least_one(each * tasks, "--gpus-per-task"), gpu_type = of, nodes = nodes or tasks, each = each}
  end
  if number(job.ntasks_per_tres) then
    local gpus = at_least_one((tasks or 1) / job.ntasks_per_tres, "--ntasks-per-gpu")
    return {gpus = gpus, nodes = nodes or gpus}
  end
end

-- Sets how many tasks for how many GPUs follow from so many tasks in all.
local function share_out(request, tasks)
  local both = common_divisor(tasks, request.gpus)
  request.all_tasks, request.tasks, request.task_gpus = tasks, tasks / both, request.gpus / both
end

-- OverSubscribe=EXCLUSIVE
local function gives_whole_nodes(partition, visible)
  return visible[partition.name] ~= nil and visible[partition.name].max_share == 0
end

-- Reads the request. Beside the fields of gpus_asked: `tasks` for every `task_gpus` GPUs, nil if each node has one; `whole`
-- nodes; and the `cpus` and `memory_mb` of a node with `node_gpus` GPUs, nil where they follow by themselves.
local function request_of(job, partitions, visible, site)
  for _, field in ipairs({"min_nodes", "max_nodes", "num_tasks", "ntasks_per_node", "ntasks_per_tres"}) do
    local most = field:find("nodes$") and 10 ^ MOST_DIGITS or slurm.NO_VAL
    if number(job[field]) and (job[field] < 1 or job[field] > most) then
      refuse("the number of nodes or of tasks is out of bounds: give at least 1 node and 1 task, and at most %d nodes", 10 ^ MOST_DIGITS)
    end
  end
  local nodes, tasks, on_each = number(job.max_nodes) or number(job.min_nodes), number(job.num_tasks), number(job.ntasks_per_node)
  if not nodes and tasks and on_each then nodes = math.ceil(tasks / on_each) end
  tasks = tasks or (on_each and on_each * (nodes or 1))
  local request = gpus_asked(job, nodes, tasks) or {nodes = nodes}
  request.own_nodes = number(job.max_nodes) or number(job.min_nodes)
  local gpus = request.gpus
  request.script = job.script ~= nil
  if request.each then
    request.tasks, request.task_gpus = 1, request.each
  elseif gpus and tasks and tasks > (nodes or 1) then
    share_out(request, tasks)
  elseif not gpus and (on_each or 1) > 1 then
    request.tasks, request.task_gpus, request.all_tasks = 1, 1, tasks
  elseif not gpus and tasks and tasks > (nodes or 1) then
    refuse("--ntasks=%d without a number of GPUs: give that, such as --gpus-per-task=1, or --ntasks-per-node instead", tasks)
  end
  if gpus == 1 and request.tasks == 1 then request.tasks, request.task_gpus = nil, nil end
  request.whole = job.shared == 0
  for _, partition in ipairs(partitions) do request.whole = request.whole or gives_whole_nodes(partition, visible) end
  local memory = number(job.min_mem_per_node)
  if memory == 0 and site.memory == false then memory = nil end
  if memory == 0 then request.whole = true end
  if not request.whole and gpus and (nodes or gpus == 1) and gpus % request.nodes == 0 then
    request.node_gpus = gpus / request.nodes
    request.memory_mb = memory
    if not request.tasks then request.cpus = number(job.cpus_per_task) end
  end
  return request
end

-- Adds what the header asks for to the flags. A flag wins over the header. A job with whole nodes has all of their GPUs, even
-- if its header asks for fewer or does not count them: no other job could use them.
local function add_request(given, request, site)
  local largest = 0
  if request.whole then
    if given["scale-unit"] then
      refuse("--scale-unit cannot be used where jobs have whole nodes (--exclusive, --mem=0, or by the partition): leave it out")
    end
    local most, units = largest_nodes(site, request.allows), {}
    if not next(most) then most = largest_nodes(site) end
    for _, gpu_type in ipairs(sorted(most)) do
      units[#units + 1] = string.format("%s=%d", gpu_type, most[gpu_type])
      if request.gpu_type == nil or request.gpu_type == gpu_type then largest = math.max(largest, most[gpu_type]) end
    end
    given["scale-unit"] = table.concat(units, ",")
    request.nodes = request.nodes or 1
    request.gpus = math.max(request.gpus or 0, largest * request.nodes)
    if request.all_tasks then share_out(request, request.all_tasks) end
  end
  request.most_nodes = request.own_nodes
  local asked = request.gpus and string.format("%d", request.gpus)
  if asked and not given["max-gpus"] then
    given["max-gpus"] = asked
    -- What salloc and srun write into the user's shell stays as they were asked.
    if not request.script then given["min-gpus"] = given["min-gpus"] or asked end
  end
  -- A flag that repeats the header changes nothing.
  if asked and given["max-gpus"] == asked then request.most_nodes = request.nodes end
  if request.gpu_type and not given["gpu-types"] then given["gpu-types"] = request.gpu_type end
end

local REFUSED_NUMBERS = {
  {"ntasks_per_socket", "--ntasks-per-socket", "give --ntasks-per-node"},
  {"ntasks_per_core", "--ntasks-per-core above 1", "give --ntasks-per-node", 1}, -- Slurm keeps 1 for any number of tasks
  {"het_job_offset", "a heterogeneous job", "its parts cannot be moved: submit one job"},
}

-- What to write instead of --gpus-per-socket.
local function by_node(job)
  local sockets, fine, gpus, gpu_type = number(job.sockets_per_node), false, nil, nil
  if #job.tres_per_socket <= MOST_LIST then fine, gpus, gpu_type = pcall(gpus_in, job.tres_per_socket, "--gpus-per-socket") end
  if not (fine and gpus and sockets) then return "give --gpus-per-node" end
  return string.format("write --gpus-per-node=%s%.0f", gpu_type and gpu_type .. ":" or "", gpus * sockets)
end

-- All that cannot be used with --adaptive.
local function check_request(job, complain)
  if job.tres_per_socket ~= nil then complain("--gpus-per-socket cannot be used with --adaptive; %s", by_node(job)) end
  for _, each in ipairs(REFUSED_NUMBERS) do
    if given_number(job[each[1]]) and job[each[1]] ~= each[4] then complain("%s cannot be used with --adaptive; %s", each[2], each[3]) end
  end
  if given_number(job.shared) and job.shared > 1 then -- user, mcs, topo: Penstock counts the job's GPUs, not its nodes
    complain("--exclusive=user, =mcs and =topo cannot be used with --adaptive: leave it out, or write --exclusive")
  end
  if job.requeue == 0 then
    complain("--no-requeue cannot be used with --adaptive: Penstock moves jobs by requeueing them: leave it out, or write "
      .. "--non-preemptible")
  end
  if job.priority == 0 then complain("--hold cannot be used with --adaptive: submit the job, and then use penstock hold") end
  if (job.reservation or ""):find(",") then complain("--reservation with --adaptive: name one reservation, not several") end
  if (job.comment or ""):find("penstock['\"]?%s*[:=]") then
    complain("--comment has a job spec, but with --adaptive the flags make the job spec: remove it from the comment")
  end
end

-- What follows from the number of GPUs on a node: tasks, CPUs of a task, memory.

local function tasks_on(request, gpus)
  return request.tasks and math.floor(gpus * request.tasks / request.task_gpus) or 1
end

-- The part of what the header asks for on a node that belongs to so many of the node's GPUs.
local function for_gpus(request, amount, gpus) return math.ceil(amount * gpus / request.node_gpus) end

-- sbatch has written numbers of the request into the job's environment, where srun and scripts find them. They are wrong
-- once the job has another number of GPUs, so penstock.so on the node replaces this mark by the numbers of the run. Where
-- it is missing, srun refuses the mark, which then tells why.
local UNCOUNTED = "one-a-GPU-but-this-node-lacks-penstock.so"
local TASK_COUNTS = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"}
local GPU_COUNTS = {"SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"}

local function check_tasks(job, spec, request, complain)
  local tasks = number(job.ntasks_per_node)
  if not request.tasks then return end
  if not request.gpus and tasks > spec.high then
    complain("--ntasks-per-node=%d with --adaptive means one task for each GPU, but --max-gpus=%d: give at most that, and "
      .. "let the script start further processes", tasks, spec.high)
  end
  if not job.script then
    complain("--ntasks-per-node above 1 with --adaptive is for sbatch: in salloc, start one task a GPU with srun, as "
      .. "docs/user/executor.md shows")
  end
end

local function mark(job, variables)
  if not job.script then return end -- salloc and srun write their own
  for _, variable in ipairs(variables) do
    if job.environment[variable] then job.environment[variable] = UNCOUNTED end
  end
end

-- Gives the job this shape, and returns the note from which the daemon does the same for other shapes; "" if the job's
-- tasks, CPUs and memory stay as they are.
local function reshape(job, request, nodes, gpus)
  job.min_nodes, job.max_nodes = nodes, nodes
  job.gres = string.format("gpu:%d", gpus)
  if request.gpus then
    job.tres_per_job = ""
    local rest = {}
    for item in ((job.tres_per_task or "") .. ","):gmatch("([^,]*),") do
      if item ~= "" and not item:find("gpu", 1, true) then rest[#rest + 1] = item end
    end
    job.tres_per_task = table.concat(rest, ",")
    mark(job, GPU_COUNTS)
  end
  local fields = {}
  local function note(field, value) fields[#fields + 1] = string.format('"%s":%s', field, value) end
  local each = tasks_on(request, gpus)
  local cpus = number(job.cpus_per_task) or 1
  if each > MOST_TASKS then
    refuse("%d GPUs of a node would have %.0f tasks, but Slurm takes at most %d on a node: ask for fewer", gpus, each, MOST_TASKS)
  end
  if request.tasks then
    note("tasks", string.format("%d", request.tasks))
    note("gpus", string.format("%d", request.task_gpus))
  end
  if request.node_gpus and (request.cpus or request.memory_mb) then
    note("node_gpus", string.format("%d", request.node_gpus))
    if request.cpus then
      note("cpus", string.format("%d", request.cpus))
      cpus = for_gpus(request, request.cpus, gpus)
      job.cpus_per_task = cpus
      mark(job, {"SLURM_CPUS_PER_TASK"})
    end
    if request.memory_mb then
      note("memory_mb", string.format("%.0f", request.memory_mb))
      job.min_mem_per_node = for_gpus(request, request.memory_mb, gpus)
    end
  end
  if request.whole then note("whole_nodes", "true") end
  if request.tasks or request.gpus or number(job.num_tasks) then
    if request.tasks or number(job.ntasks_per_node) then job.ntasks_per_node = each end
    job.num_tasks = nodes * each
    job.pn_min_cpus, job.min_cpus = each * cpus, nodes * each * cpus
    if request.tasks or request.most_nodes ~= 1 then mark(job, TASK_COUNTS) end
  end
  return #fields > 0 and ',"penstock_request":{' .. table.concat(fields, ",") .. "}" or ""
end

-- Sets spec.low and spec.high, the bounds of the GPU count.
local function check_counts(spec, unit)
  local low, high = spec["min-gpus"], spec["max-gpus"]
  if spec.adaptive == "rigid" then
    low, high = low or high, high or low
    if not low then refuse("--adaptive=rigid needs a GPU count, such as --max-gpus=4") end
    if low ~= high then
      refuse("--adaptive=rigid takes one GPU count, but --min-gpus=%d and --max-gpus=%d: give one of them, or "
        .. "--adaptive=strong-scaling", low, high)
    end
  elseif not high then
    refuse("--adaptive needs the most GPUs that the job can use, such as --max-gpus=8 or --gpus-per-node=8")
  end
  low = low or math.min(unit, high)
  if low > high then refuse("--min-gpus=%d is more than --max-gpus=%d: lower it, or raise --max-gpus", low, high) end
  spec.low, spec.high = low, high
end

-- As JobSpec checks it: at least one type that the job can use has a multiple of its unit within the bounds.
local function check_units(spec, task_gpus)
  local unit, chosen = spec["scale-unit"] or {all = 1}, spec["gpu-types"]
  if not (unit.all or (chosen and not chosen.excluded)) then return end
  for _, gpu_type in ipairs(unit.all and {"any"} or chosen.names) do
    local step = multiple_of(unit.all or unit.of[gpu_type] or 1, task_gpus)
    if math.floor(spec.high / step) * step >= spec.low then return end
  end
  if task_gpus > 1 then
    refuse("no GPU count from %d to %d is a multiple of the %d GPUs of a task: make --max-gpus a multiple of it", spec.low,
      spec.high, task_gpus)
  end
  refuse("no GPU count from %d to %d is a multiple of --scale-unit: make --max-gpus a multiple of it", spec.low, spec.high)
end

-- The job spec of the flags `given` (name -> text) and of the header's request at `site`: the values by flag, and the spec
-- as JSON. Raises all its refusals at once.
function penstock.spec(given, site, request)
  local spec, fields, bad = {}, {}, {}
  local try, complain, found = gathering()
  request = request or {}
  for flag in pairs(given) do
    if not VARIABLES[flag:upper():gsub("-", "_")] then
      refuse("slurmctld does not know the flag %s: its penstock.lua is older than the plugin on this host", shown(flag))
    end
  end
  if not given.adaptive then refuse("--%s needs --adaptive", sorted(given)[1]) end
  add_request(given, request, site)
  local task_gpus = request.task_gpus or 1
  for _, flag in ipairs(FLAGS) do
    local text = given[flag.name]
    if text then
      local value, why
      if #text <= MOST_LIST then value, why = READERS[flag.syntax](text, flag) end
      if value == nil then
        bad[flag.name] = true
        complain("--%s=%s: %s", flag.name, shown(text), why or string.format("give %s, such as --%s=%s", flag.form, flag.name, flag.example))
      else
        spec[flag.name] = value
        -- The bounds of the GPU count are written below, once check_counts knows them.
        if flag.name ~= "min-gpus" and flag.name ~= "max-gpus" then
          fields[#fields + 1] = WRITERS[flag.syntax](value, flag)
        end
      end
    end
  end
  local counts = not (bad.adaptive or bad["min-gpus"] or bad["max-gpus"])
  if counts then try(check_counts, spec, task_gpus) end

  local known = largest_nodes(site)
  local chosen, unit = spec["gpu-types"], spec["scale-unit"]
  if chosen then try(check_types, "gpu-types", chosen.names, known) end
  if unit then try(check_types, "scale-unit", unit.names, known) end
  if spec.high and not (bad["gpu-types"] or bad["scale-unit"]) then try(check_units, spec, task_gpus) end
  local family = spec["model-family"]
  if family and not site.families[family] then
    complain("--model-family=%s is not in the catalogue; the families are %s", family, table.concat(sorted(site.families), ", "))
  end
  local batch, most = spec["batch-size"], spec["max-batch-size"]
  if batch and most and most < batch then complain("--max-batch-size=%d is less than --batch-size=%d", most, batch) end
  if spec.burst == "never" and spec["burst-budget"] then
    complain("--burst-budget is for jobs that may burst: leave it out, or give --burst=allowed")
  end
  if spec.burst == "only" and site.cloud == false then
    complain("--burst=only: this site has no cloud: leave it out, or ask an admin to set [daemon] cloud")
  end
  if #found > 0 then error({refusal = found[1], refusals = found}, 0) end
  fields[#fields + 1] = string.format('"min_gpus":%d,"max_gpus":%d', spec.low, spec.high)
  if request.most_nodes then fields[#fields + 1] = string.format('"max_nodes":%d', request.most_nodes) end
  if task_gpus > 1 then fields[#fields + 1] = string.format('"gpus_per_task":%d', task_gpus) end
  return spec, '{"penstock":{' .. table.concat(fields, ",") .. "}}"
end

-- The nodes that the user allows, by --nodelist, --exclude and --constraint.

-- The names of a host list such as t4-[00-02,05],x, as a set.
local function hosts(option, text)
  local found, count, looked_at = {}, 0, 0
  local function wrong() refuse("%s=%s: give names of nodes, such as %s=node[01-04]", option, shown(text), option) end
  -- Also a part that names no node ends in admin_comment.
  if text:find("[^A-Za-z0-9._,%[%]-]") then wrong() end
  local function expand(item)
    looked_at = looked_at + #item
    if looked_at > MOST_LOOKED_AT then wrong() end
    local before, ranges, after = item:match("^([^%[]*)%[([^%]]*)%](.*)$")
    if not before then
      count = count + 1
      if count > MOST_NODES or not item:find("^[A-Za-z0-9._-]+$") then wrong() end
      found[item] = true
      return
    end
    for range in (ranges .. ","):gmatch("([^,]*),") do
      local first, last = range:match("^([0-9]+)%-([0-9]+)$")
      first = first or range:match("^[0-9]+$")
      last = last or first
      if not first or #first > MOST_DIGITS or #last > MOST_DIGITS or last - first > MOST_NODES then wrong() end
      if last - first < 0 then wrong() end
      for number = tonumber(first), tonumber(last) do
        expand(before .. string.format("%0" .. #first .. "d", number) .. after)
      end
    end
  end
  local pieces, open = {}, false
  for piece in (text .. ","):gmatch("([^,]*),") do
    pieces[#pieces + 1] = piece
    local bracket = piece:match("^.*([%[%]])")
    if bracket then open = bracket == "[" end
    if not open then
      expand(table.concat(pieces, ","))
      pieces = {}
    end
  end
  if open then wrong() end
  return found, count
end

-- Tells whether a node has the features of --constraint: all of a&b, or one of a|b.
local function having(text, site)
  if text:find("[^A-Za-z0-9._:=+&|-]") or (text:find("&") and text:find("|", 1, true)) then
    refuse("--constraint=%s cannot be used with --adaptive: join features by & or by |, such as --constraint='a&b'", shown(text))
  end
  if not site.features then error(SITE .. " lists no features: run `penstock slurm sync`", 0) end
  local any, nodes_of = text:find("|", 1, true), {} -- each feature once, and one for all that no node has
  for feature in text:gmatch("[^&|]+") do
    nodes_of[site.features[feature] and feature or ""] = site.features[feature] or {}
  end
  return function(node)
    for _, nodes in pairs(nodes_of) do
      local has = nodes[node] or false
      if has == (any ~= nil) then return has end
    end
    return not any
  end
end

-- Returns whether a node is allowed, as a function, and the note about it for the daemon; "" if all nodes are.
local function allowed_nodes(job, given, site)
  local named, count
  if job.req_nodes then named, count = hosts("--nodelist", job.req_nodes) end
  if named and job.min_nodes == count then job.min_nodes, job.max_nodes = slurm.NO_VAL, slurm.NO_VAL end -- sbatch counts the list
  local excluded = job.exc_nodes and hosts("--exclude", job.exc_nodes) or {}
  -- Slurm reads a,b as a&b.
  if job.features then job.features = (job.features:gsub("[,&]+", "&"):gsub("^&", ""):gsub("&$", "")) end
  local alone = job.features and job.features:match("^%[([^%[%]&|*]+)%]$")
  if alone then job.features = alone end -- [a] asks Slurm for what a asks for
  local has = job.features and having(job.features, site)
  local unknown, fields = set_of(sorted(named or {})), {}
  for _, partition in ipairs(site.partitions) do
    for _, sizes in pairs(partition.types) do
      for node in pairs(sizes) do unknown[node] = nil end
    end
  end
  if next(unknown) then refuse("--nodelist: Penstock manages no GPUs of a node %s", sorted(unknown)[1]) end
  if (named or has) and given.burst == "only" then
    refuse("--burst=only cannot be used with --nodelist and --constraint, which name nodes of this site: leave them out")
  end
  for _, each in ipairs({{"nodelist", job.req_nodes}, {"exclude", job.exc_nodes}, {"constraint", job.features}}) do
    if each[2] then fields[#fields + 1] = quoted(each[1]) .. ":" .. quoted(each[2]) end
  end
  local tmp_mb = number(job.pn_min_tmp_disk)
  if tmp_mb and tmp_mb > 0 then fields[#fields + 1] = string.format('"tmp_mb":%d', tmp_mb) end
  local function allows(node) return (not named or named[node]) and not excluded[node] and (not has or has(node)) end
  return allows, #fields > 0 and ',"penstock_nodes":{' .. table.concat(fields, ",") .. "}" or ""
end

-- The number in gres:gpu:8, of --cpus-per-gpu and --mem-per-gpu.
local function per_gpu(text)
  local count = (text or ""):match("gpu[:=]([0-9]+)$")
  return count and #count <= MOST_DIGITS and tonumber(count) or nil
end

-- What the job needs beside `gpus` GPUs of a node: CPUs, memory and temporary disk in MB.
local function beside(job, request, gpus)
  local tasks = tasks_on(request, gpus)
  local each = number(job.cpus_per_task) or 1
  if request.cpus then each = for_gpus(request, request.cpus, gpus) end
  local a_gpu = per_gpu(job.cpus_per_tres)
  local cpus = math.max(a_gpu and a_gpu * gpus or tasks * each, tasks)
  local memory, per_cpu = number(job.min_mem_per_node), number(job.min_mem_per_cpu)
  if request.memory_mb then
    memory = for_gpus(request, request.memory_mb, gpus)
  elseif per_cpu then
    memory = per_cpu * cpus
  end
  return {cpus = cpus, memory_mb = memory or 0, tmp_mb = number(job.pn_min_tmp_disk) or 0}
end

-- Whether a node of a partition could ever give a job all this. Slurm would never start the job there otherwise.
local function could_hold(site, partition, node, needs)
  local has = site.nodes and site.nodes[node]
  if not has then return true end -- the list is of an older penstock: Slurm decides
  return needs.cpus <= math.min(has.cpus, partition.most_cpus or has.cpus)
    and needs.memory_mb <= math.min(has.memory_mb, partition.most_memory_mb or has.memory_mb) and needs.tmp_mb <= has.tmp_mb
end

-- The fewest nodes of `partition` that suit the job, the GPUs on each, and the nodes that the job must not get, by their
-- GPU type, because its user does not allow them, or because they have several types, of which Slurm would give it a mixture.
-- nil if no shape suits it. `holds(partition, node, gpus)` tells whether the node could hold so many GPUs of the job.
local function shape_in(partition, spec, allows, request, holds)
  local task_gpus = request.task_gpus or 1
  local chosen, unit = spec["gpu-types"], spec["scale-unit"]
  local named = chosen and set_of(chosen.names)
  local order, others, types_of = sorted(partition.types), {}, {}
  if chosen and not chosen.excluded then order = chosen.names end
  for gpu_type, sizes in pairs(partition.types) do
    local suits = not named or (named[gpu_type] or false) ~= chosen.excluded
    for node in pairs(sizes) do
      types_of[node] = (types_of[node] or 0) + 1
      if not (suits and allows(node)) or types_of[node] > 1 then others[node] = true end
    end
  end
  others = sorted(others)
  for _, gpu_type in ipairs(order) do
    local sizes = partition.types[gpu_type]
    local step = multiple_of(unit and (unit.all or unit.of[gpu_type]) or 1, task_gpus)
    local gpus = math.ceil(spec.low / step) * step
    if sizes and not (named and chosen.excluded and named[gpu_type]) then
      local have = {}
      for node, size in pairs(sizes) do
        if allows(node) then have[#have + 1] = size end
      end
      table.sort(have, function(a, b) return a > b end)
      for nodes = 1, math.min(#have, gpus, request.most_nodes or gpus) do
        local each = math.ceil(gpus / nodes)
        if have[nodes] >= each and nodes * each <= spec.high and nodes * each % step == 0 and each % task_gpus == 0 then
          local able = 0
          for node, size in pairs(sizes) do
            if size >= each and allows(node) and holds(partition, node, each) then able = able + 1 end
            if able == nodes then return nodes, each, others end
          end
        end
      end
    end
  end
end

local function describe(site)
  local lines = {}
  for _, partition in ipairs(site.partitions) do
    for _, gpu_type in ipairs(sorted(partition.types)) do
      local nodes, most = 0, 0
      for _, size in pairs(partition.types[gpu_type]) do nodes, most = nodes + 1, math.max(most, size) end
      lines[#lines + 1] = string.format("%s: %d nodes with up to %d %s", partition.name, nodes, most, gpu_type)
    end
  end
  return table.concat(lines, "; ")
end

-- By MaxTime and --time, both in minutes.
local function long_enough(partition, job)
  return not given_number(job.time_limit) or not given_number(partition.max_time) or job.time_limit <= partition.max_time
end

-- The partitions to try: those that the user names, or else the managed ones that the user may use and that allow --time. Among
-- the latter, only those that share nodes, if there are some and Slurm's default partition is none that gives whole nodes.
local function partitions_for(job, visible, site)
  local managed, names, found, shorter = {}, {}, {}, false
  for _, partition in ipairs(site.partitions) do
    managed[partition.name] = partition
    names[#names + 1] = partition.name
    local own = not job.partition and visible[partition.name]
    if own and long_enough(own, job) then found[#found + 1] = partition end
    shorter = shorter or (own and not long_enough(own, job))
  end
  local unmanaged
  for each in (job.partition or ""):gmatch("[^,]+") do
    if managed[each] == nil then unmanaged = unmanaged or each end
    found[#found + 1], managed[each] = managed[each] or nil, false -- each once
  end
  if unmanaged and #found == 0 then
    refuse("Penstock does not manage partition %s; it manages %s", shown(unmanaged), table.concat(names, ", "))
  elseif unmanaged then
    local kept = {}
    for i, partition in ipairs(found) do kept[i] = partition.name end
    job.partition = table.concat(kept, ",")
    slurm.log_user("penstock: the job runs in %s: Penstock does not manage partition %s", job.partition, shown(unmanaged))
  end
  if not job.partition then
    local shared = {}
    for i, partition in ipairs(found) do
      if not gives_whole_nodes(partition, visible) then
        shared[#shared + 1] = partition
      elseif visible[partition.name].flag_default == 1 then
        table.insert(found, 1, table.remove(found, i))
        return found
      end
    end
    if #shared > 0 then found = shared end
  end
  if #found == 0 and shorter then
    refuse("--time is more than the MaxTime of every partition that Penstock manages and you may use: give a shorter one")
  end
  if #found == 0 then refuse("you may not use any partition that Penstock manages: %s", table.concat(names, ", ")) end
  return found
end

-- Leaves only the partitions in which the site lets Penstock manage this user's jobs: [slurm] adopt.
local function keep_adopted(job, site)
  local adopt, kept = site.adopt, {}
  if not adopt or adopt["user:" .. (job.user_name or "")] then return end
  if adopt["account:" .. (job.account or job.default_account or "")] then return end
  for _, partition in ipairs(site.partitions) do
    local named = not job.partition or ("," .. job.partition .. ","):find("," .. partition.name .. ",", 1, true)
    if named and adopt["partition:" .. partition.name] then kept[#kept + 1] = partition end
  end
  if #kept == 0 then
    refuse("this site lets Penstock manage only jobs of %s: submit the job without adaptive flags, or ask an admin ([slurm] adopt)",
      table.concat(sorted(adopt), ", "))
  end
  site.partitions = kept
end

local UNSAVED = "penstock: the job will not be moved or resized before it has saved a checkpoint. If it saves when it is "
  .. "asked to, submit it with --checkpointable; see docs/user/saving.md"

local TASK_A_GPU = "penstock: the job has one task for each of its GPUs, however many it has, whatever N --ntasks-per-node=N "
  .. "says"

-- Says when a job of this size is expected to start, if `penstock slurm sync` has lately learnt it from penstockd.
local function say_start(spec)
  local known = dofile(STARTS)[spec.low]
  if known and os.time() < known.until_s then slurm.log_user("%s", "penstock: " .. known.text) end
end

-- Whether a job may start anywhere, and as soon as it has GPUs.
local function is_usual(job, spec)
  return not (job.req_nodes or job.exc_nodes or job.features or job.reservation or job.dependency or spec["gpu-types"])
    and job.begin_time == 0
end

-- `penstock submit` sets it when it asks how a header is read. sbatch sends such a variable with every --export.
local EXPLAIN = "SLURM_PENSTOCK_EXPLAIN"

-- By it, the executor in the job finds where it reports.
local SPOOL = "PENSTOCK_SPOOL"

local function counted(low, high)
  if low < high then return string.format("%d to %d GPUs", low, high) end
  return string.format("%d GPU%s", low, low == 1 and "" or "s")
end

-- As --time is written: days-hours:minutes:seconds, without days if there are none.
local function shown_time(minutes)
  local text = string.format("%02d:%02d:00", math.floor(minutes / 60) % 24, minutes % 60)
  return minutes >= 1440 and string.format("%d-%s", math.floor(minutes / 1440), text) or text
end

-- What the user is told about how the request was read.
local function say_request(job, spec, request, partitions)
  local parts, types, names = {counted(spec.low, spec.high)}, spec["gpu-types"], {}
  local function say(text, value, least)
    if value and value ~= 0 and value ~= least then parts[#parts + 1] = string.format(text, value) end
  end
  if types then parts[1] = parts[1] .. (types.excluded and " of any type but " or " of type ") .. table.concat(types.names, " or ") end
  if request.whole then parts[#parts + 1] = "whole nodes" end
  say("on at most %d node" .. (request.most_nodes == 1 and "" or "s"), request.most_nodes)
  say("on nodes with %s", job.features and shown(job.features))
  say("among %s", job.req_nodes and shown(job.req_nodes))
  say("not on %s", job.exc_nodes and shown(job.exc_nodes))
  for i, partition in ipairs(partitions) do names[i] = partition.name end
  say("in partition %s", table.concat(names, " or "))
  if request.tasks then
    local tasks = request.tasks == 1 and "one task" or string.format("%d tasks", request.tasks)
    parts[#parts + 1] = tasks .. (request.task_gpus == 1 and " for each GPU" or string.format(" for every %d GPUs", request.task_gpus))
  end
  if request.cpus and request.cpus > 1 then
    say("%g CPUs for each GPU", request.cpus / request.node_gpus)
  else
    say("%d CPUs for each task", number(job.cpus_per_task), 1)
  end
  say("%g CPUs for each GPU", per_gpu(job.cpus_per_tres))
  if request.memory_mb then
    say("%.0f MB for each GPU", request.memory_mb / request.node_gpus)
  elseif not request.whole then
    say("%.0f MB for each node", number(job.min_mem_per_node))
  end
  say("%.0f MB for each CPU", number(job.min_mem_per_cpu))
  say("%.0f MB for each GPU", per_gpu(job.mem_per_tres))
  say("%.0f MB of temporary disk for each node", number(job.pn_min_tmp_disk))
  say("with licences %s", job.licenses and shown(job.licenses))
  if not given_number(job.time_limit) then
    say("%s", "with the time limit of its partition")
  else
    say("%s", job.time_limit > slurm.NO_VAL and "without a time limit" or "for at most " .. shown_time(job.time_limit))
  end
  local flags = string.format("--min-gpus=%d --max-gpus=%d", spec.low, spec.high)
  if types then flags = flags .. " --gpu-types=" .. (types.excluded and "^" or "") .. table.concat(types.names, types.excluded and ",^" or ",") end
  slurm.log_user("%s", "penstock: the job can have " .. table.concat(parts, ", ") .. ". In flags, this is " .. flags
    .. "; give others to change it")
end

local function adapt(job, visible, given)
  local read, site = pcall(dofile, SITE)
  if not read or type(site) ~= "table" then
    error("the list of the site's partitions cannot be read (" .. tostring(site) .. "): run `penstock slurm sync`", 0)
  end
  keep_adopted(job, site)
  local try, complain, problems = gathering()
  local allows, node_note = try(allowed_nodes, job, given, site)
  local partitions = try(partitions_for, job, visible, site)
  local request = try(request_of, job, partitions or {}, visible, site)
  check_request(job, complain)
  local spec, json
  if request then request.allows = allows end
  if request then spec, json = try(penstock.spec, given, site, request) end
  if spec then check_tasks(job, spec, request, complain) end
  if not job.script and given["non-preemptible"] ~= "yes" then
    complain("a job of salloc or srun cannot be restarted: add --non-preemptible, or use sbatch")
  end
  if #problems > 0 then error({refusals = problems}, 0) end
  local usual = is_usual(job, spec)
  local function holds(partition, node, gpus) return could_hold(site, partition, node, beside(job, request, gpus)) end
  for _, partition in ipairs(partitions) do
    local nodes, gpus, others = shape_in(partition, spec, allows, request, holds)
    if nodes then
      job.partition = job.partition or partition.name
      job.requeue = 1
      local begin, notes = job.begin_time, node_note .. reshape(job, request, nodes, gpus)
      if request.gpus or (job.script and job.environment[EXPLAIN]) then say_request(job, spec, request, partitions) end
      if not request.gpus and request.tasks then slurm.log_user("%s", TASK_A_GPU) end
      if job.req_nodes then job.req_nodes = "" end -- Slurm would give the job all of them, and the daemon overwrites it
      if begin ~= 0 then notes = notes .. string.format(',"penstock_begin_s":%d', begin) end
      -- What salloc and srun start has the user's own environment.
      if job.script and (job.environment[SPOOL] or "") == "" then
        if site.spool then job.environment[SPOOL] = site.spool end
        notes = notes .. ',"penstock_spool":' .. quoted(((site.spool or ""):gsub('["\\]', "\\%0")))
      end
      if site.plain_after_s then
        notes = notes .. string.format(',"penstock_plain":{"partition":"%s","nodes":%d,"gpus_per_node":%d}', partition.name, nodes, gpus)
        job.begin_time = math.max(os.time(), begin) + site.plain_after_s
        if job.exc_nodes then others[#others + 1] = job.exc_nodes end
        if #others > 0 then job.exc_nodes = table.concat(others, ",") end
      else
        job.priority = 0
      end
      job.admin_comment = json:sub(1, -2) .. notes .. "}"
      if spec["non-preemptible"] ~= "yes" and spec.checkpointable ~= "yes" and not spec["checkpoint-every"] then
        slurm.log_user("%s", UNSAVED)
      end
      if usual then pcall(say_start, spec) end
      return
    end
  end
  local on = (job.req_nodes or job.exc_nodes or job.features) and " on the nodes that --nodelist, --exclude and --constraint allow" or ""
  if request.whole then on = on .. " on whole nodes" end
  if request.most_nodes then on = on .. string.format(" on at most %d node%s", request.most_nodes, request.most_nodes == 1 and "" or "s") end
  for _, partition in ipairs(partitions) do
    local nodes, gpus = shape_in(partition, spec, allows, request, function() return true end)
    if nodes then
      local needs = beside(job, request, gpus)
      refuse("no node could ever run the job: with %s on a node it needs %d CPUs, %.0f MB of memory and %.0f MB of temporary disk "
        .. "there, and Slurm would say that the node configuration is not available: ask for less", counted(gpus, gpus), needs.cpus,
        needs.memory_mb, needs.tmp_mb)
    end
  end
  refuse("no partition has %s of the kind that the flags ask for%s; there are %s", counted(spec.low, spec.high), on, describe(site))
end

-- For slurm_job_submit.
function penstock.job_submit(job, visible, uid)
  local given = flags_of(job)
  if not given then return slurm.SUCCESS end
  local fine, problem = pcall(adapt, job, visible, given)
  if fine then return slurm.SUCCESS end
  local refusals = type(problem) == "table" and (problem.refusals or {problem.refusal})
  if refusals then
    for _, text in ipairs(refusals) do slurm.log_user("%s", "penstock: " .. text) end
  else
    slurm.log_error("%s", "penstock: user " .. tostring(uid) .. "'s adaptive job was refused: " .. tostring(problem))
    slurm.log_user("%s", "penstock: adaptive jobs cannot be submitted until the site's admin has fixed this: "
      .. tostring(problem))
  end
  return slurm.ERROR
end

-- For slurm_job_modify: the user of an adaptive job may not change what the daemon changes. `scontrol` shows only
-- "Access/permission denied", because Slurm passes on no message from here.

local GUARDED_TEXTS = {
  "admin_comment", "batch_features", "cpus_per_tres", "exc_nodes", "features", "mem_per_tres", "partition", "prefer",
  "req_nodes", "reservation", "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task",
}
-- nice, because with PriorityType=priority/basic a new value removes a hold: seen on 22.05.8.
local GUARDED_NUMBERS = {
  "contiguous", "cores_per_socket", "cpus_per_task", "max_cpus", "max_nodes", "min_cpus", "min_mem_per_cpu",
  "min_mem_per_node", "min_nodes", "nice", "ntasks_per_node", "ntasks_per_socket", "ntasks_per_tres", "num_tasks",
  "pn_min_cpus", "pn_min_tmp_disk", "priority", "req_switch", "requeue", "shared", "sockets_per_node", "threads_per_core",
}

local function touches_placement(job)
  for _, field in ipairs(GUARDED_TEXTS) do
    if job[field] ~= nil then return field end
  end
  for _, field in ipairs(GUARDED_NUMBERS) do
    if given_number(job[field]) then return field end
  end
  return job.begin_time ~= 0 and "begin_time" or nil
end

function penstock.job_modify(job, record, visible, uid)
  if uid == 0 or not (record.admin_comment or ""):find('"penstock"', 1, true) then return slurm.SUCCESS end
  local read, site = pcall(dofile, SITE)
  if read and type(site) == "table" and site.admins and site.admins[uid] then return slurm.SUCCESS end
  local field = touches_placement(job)
  if not field then return slurm.SUCCESS end
  slurm.log_info("%s", string.format("penstock: user %d may not change %s of an adaptive job", uid, field))
  return slurm.ESLURM_ACCESS_DENIED
end

-- For tests: the flags' names, in order.
penstock.flags = {}
for i, flag in ipairs(FLAGS) do penstock.flags[i] = flag.name end

return penstock
