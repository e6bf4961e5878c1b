-- Reads cases from standard input, each ended by \30 and made of FLAG=VALUE ended by \31, and says of each what
-- penstock.lua makes of it at a site with a100, rtx and t4: "yes JSON" or "no SENTENCE". arg[1] is penstock.lua.
slurm = {NO_VAL = 4294967294, NO_VAL16 = 65534, NO_VAL8 = 254, NO_VAL64 = 2 ^ 64 - 2, SUCCESS = 0, ERROR = -1}

local penstock = dofile(arg[1])
local site = {
  cloud = arg[2] ~= "--no-cloud",
  families = {["bert-squad"] = true, ncf = true},
  partitions = {{name = "all", types = {a100 = {a = 8}, rtx = {b = 8}, t4 = {c = 4}}}},
}

if arg[2] == "--list" then
  print(table.concat(penstock.flags, " "))
  os.exit()
end
for case in io.read("*a"):gmatch("([^\30]*)\30") do
  local given = {}
  for flag, value in case:gmatch("([^=\31]*)=([^\31]*)\31") do given[flag] = value end
  local fine, problem, json = pcall(penstock.spec, given, site)
  if fine then
    print("yes " .. json)
  elseif type(problem) == "table" and problem.refusal then
    print("no " .. problem.refusal)
  else
    print("broken " .. tostring(problem))
  end
end
